"""Policy gradients: seeds do not meet, returns and gradients against plain loops, bad input."""

import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torch import nn

import zeromean as zm
from zeromean.experiments.exploration import bandit, fig6
from zeromean.experiments.exploration.deep_sea_environment import LEFT, RIGHT, DeepSea
from zeromean.experiments.exploration.environments import (
    Acrobots,
    Environments,
    Task,
    make_environment,
)
from zeromean.experiments.exploration.learner import Episodes, Learner, Settings
from zeromean.experiments.exploration.policies import METHODS
from zeromean.experiments.exploration.policy_gradient import train

CARTPOLE = fig6.TASKS["cartpole"]
SMALL = Settings(episodes=6, width=8, lr=1e-2)
every_method = pytest.mark.parametrize("method", METHODS)


@every_method
def test_seeds_trained_together_score_as_those_trained_alone(method):
    together = train(CARTPOLE, method, [3, 4], SMALL)
    for i, seed in enumerate((3, 4)):
        alone = train(CARTPOLE, method, [seed], SMALL)
        assert {kind: [scores[i]] for kind, scores in together.items()} == alone
    assert together["training"][0] != together["training"][1]
    assert np.shape(together["evaluation"]) == (2, 6)


@every_method
def test_updates_do_not_depend_on_company_but_for_rounding(method):
    torch.manual_seed(0)
    both = learner_of(method, seeds=(3, 4), width=256)
    alone = learner_of(method, seeds=(3,), width=256)
    for k in range(20):
        episodes = episodes_of([60, 45], [False, True])
        own = Episodes(*(column[:1] for column in episodes))
        both.update(episodes, both.draw_noise(k))
        alone.update(own, alone.draw_noise(k))
    for name, parameter in alone.parameters.items():
        torch.testing.assert_close(both.parameters[name][:1], parameter, rtol=1e-3, atol=1e-5)


def test_an_interrupted_training_ends_with_the_same_scores(monkeypatch, tmp_path):
    whole = train(CARTPOLE, "variance", [0, 1], SMALL)
    update = Learner.update

    def interrupted(self, *arguments):
        if not hasattr(self, "calls"):
            self.calls = 0
        self.calls += 1
        if self.calls == 5:
            raise KeyboardInterrupt
        update(self, *arguments)

    checkpoint = tmp_path / "policies.pt"
    monkeypatch.setattr(Learner, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(CARTPOLE, "variance", [0, 1], SMALL, checkpoint=checkpoint, every=2)
    monkeypatch.setattr(Learner, "update", update)
    assert checkpoint.exists()
    assert train(CARTPOLE, "variance", [0, 1], SMALL, checkpoint=checkpoint, every=2) == whole
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match=r"is cut short or damaged\. Remove it"):
        train(CARTPOLE, "variance", [0, 1], SMALL, checkpoint=checkpoint)


def learner_of(method, seeds=(0, 1), **settings):
    settings = {"episodes": 1, "width": 8, **settings}
    return Learner(make_environment(CARTPOLE), method, seeds, Settings(**settings))


@every_method
def test_a_drawn_policy_is_the_network_under_held_noise(method):
    learner = learner_of(method, evaluations=2)
    noise = learner.draw_noise(7)
    observations = torch.randn(2, 3, 4)
    scores = learner.drawn_policy(noise)(observations)
    for i in range(2):
        parameters = {name: value[i].detach() for name, value in learner.parameters.items()}
        for j in range(3):
            own = {name: value[i, j] for name, value in noise.items()}
            with zm.held_noise(learner.policy, own):
                expected = torch.func.functional_call(
                    learner.policy, parameters, observations[i, j]
                )
            torch.testing.assert_close(scores[i, j], expected)


def test_noise_is_fresh_for_every_episode_seed_and_environment():
    learner = learner_of("variance", evaluations=1)
    draws = [learner.draw_noise(e)["second.weight"] for e in (0, 1)]
    networks = torch.stack(draws).flatten(0, 2).flatten(1)
    assert len(networks) == 8
    assert torch.corrcoef(networks).sub(torch.eye(8)).abs().max() < 0.6
    assert torch.equal(learner.draw_noise(1)["second.weight"], draws[1])
    # Weights that have means are evaluated without noise.
    noisy = learner_of("parameter_noise", evaluations=1).draw_noise(0)["second.weight"]
    assert (noisy[:, 1] == 0).all()
    assert (noisy[:, 0] != 0).all()
    assert learner_of("deterministic").draw_noise(0) == {}


def episodes_of(lengths, cut_off):
    steps = max(lengths)
    running = torch.arange(steps) < torch.tensor(lengths).unsqueeze(1)
    return Episodes(
        torch.randn(len(lengths), steps, 4),
        torch.randint(2, (len(lengths), steps)),
        torch.randn(len(lengths), steps) * running,
        running,
        torch.randn(len(lengths), 4),
        torch.tensor(cut_off),
    )


def test_returns_and_gradient_are_those_of_the_textbook():
    torch.manual_seed(0)
    learner = learner_of("variance", lr=1e-3, discount=0.9, sharpness=2.0, value_steps=0)
    episodes, noise = episodes_of([5, 3], [False, True]), learner.draw_noise(0)
    before = {name: value.detach().clone() for name, value in learner.parameters.items()}
    baseline = learner.baseline_parameters
    with torch.no_grad():
        baseline["4.weight"].normal_()
    learner.length = torch.tensor([8.0, 8.0])  # Of earlier episodes.
    learner.update(episodes, noise)
    for i, length in enumerate((5, 3)):
        policy = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)
        )
        scale = before["second.weight.scale"][i].clone().requires_grad_()
        weights = {
            "0.weight": before["first.weight"][i],
            "0.bias": before["first.bias"][i],
            "2.weight": scale * noise["second.weight"][i, 0],
            "2.bias": before["second.bias"][i],
            "4.weight": before["last.weight"][i],
            "4.bias": before["last.bias"][i],
        }
        own = {name: value[i].detach() for name, value in baseline.items()}

        def value(observation, own=own):
            return 10 * torch.func.functional_call(learner.baseline, own, observation).item()

        advantages = []
        for t in range(length):
            to_go = sum(0.9 ** (k - t) * episodes.rewards[i, k].item() for k in range(t, length))
            if episodes.cut_off[i]:
                to_go += 0.9 ** (length - t) * value(episodes.last_observations[i])
            advantages.append(to_go - value(episodes.observations[i, t]))
        size = np.sqrt(np.mean(np.square(advantages)))
        mean_length = 0.9 * 8 + 0.1 * length
        loss = 0
        for t in range(length):
            scores = torch.func.functional_call(policy, weights, episodes.observations[i, t])
            log_proba = (2 * scores).log_softmax(-1)[episodes.actions[i, t]]
            loss = loss - log_proba * advantages[t] / size / mean_length
        (expected,) = torch.autograd.grad(loss, scale)
        torch.testing.assert_close(
            learner.parameters["second.weight.scale"].grad[i], expected, rtol=1e-4, atol=1e-6
        )
    # Adam's first step: the learning rate in the direction of the gradient.
    moved = learner.parameters["last.weight"].detach() - before["last.weight"]
    assert moved.abs().max() <= 1.01e-3


def test_the_baseline_learns_the_returns():
    torch.manual_seed(0)
    learner = learner_of("deterministic", value_steps=400, value_lr=1e-2, discount=0.9)
    episodes = episodes_of([40, 30], [False, False])
    returns, _ = learner._returns(episodes)
    learner.update(episodes, {})
    error = (learner._values(episodes.observations) - returns)[episodes.running]
    assert error.square().mean() < 0.1 * returns[episodes.running].var()


def test_a_policy_learns_to_balance():
    scores = train(CARTPOLE, "deterministic", [0, 1], Settings(episodes=60, width=64, lr=5e-3))
    curves = np.array(scores["evaluation"])
    assert curves[:, -10:].mean() > 3 * curves[:, :10].mean()


def test_bad_input_gets_a_sentence(monkeypatch):
    with pytest.raises(ValueError, match="there is no policy 'bold'; choose from deterministic"):
        train(CARTPOLE, "bold", [0], SMALL)
    with pytest.raises(ValueError, match="gymnasium cannot make 'Nowhere-v0'"):
        train(Task(environment="Nowhere-v0", time_limit=9, scale=(1.0,)), "variance", [0], SMALL)
    pendulum = Task(environment="Pendulum-v1", time_limit=9, scale=(1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="use one with a Discrete action space"):
        train(pendulum, "variance", [0], SMALL)
    with pytest.raises(ValueError, match="a seed and an episode at least, got 0 and 6"):
        train(CARTPOLE, "variance", [], SMALL)
    short = Task(environment="CartPole-v1", time_limit=9, scale=(1.0, 1.0))
    with pytest.raises(ValueError, match=r"2 numbers to scale .* has 4"):
        train(short, "variance", [0], SMALL)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[experiments\]'"):
        train(CARTPOLE, "variance", [0], SMALL)


def test_deep_sea_is_an_environment_with_its_treasure_at_the_right():
    sea = DeepSea(5)
    check_env(sea, skip_render_check=True)

    def score(action):
        sea.reset(seed=0)
        steps = [sea.step(action) for _ in range(5)]
        assert [ended for _, _, ended, _, _ in steps] == [False] * 4 + [True]
        return sum(reward for _, reward, *_ in steps)

    assert score(RIGHT) == pytest.approx(0.99)
    assert score(LEFT) == 0
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        DeepSea(0)


def test_held_noise_in_gymnasiums_vector_environments():
    torch.manual_seed(0)
    environments = gym.make_vec("CartPole-v1", num_envs=3)
    policy = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), zm.Linear(8, 2))
    observations, _ = environments.reset(seed=0)
    with torch.no_grad(), zm.held_noise(policy, num_objects=3) as held:
        for _ in range(60):
            probe = policy(torch.ones(3, 4))
            actions = policy(torch.from_numpy(observations)).argmax(1).numpy()
            observations, _, ended, cut_off, _ = environments.step(actions)
            done = torch.from_numpy(ended | cut_off)
            held.redraw(done)
            changed = (policy(torch.ones(3, 4)) != probe).any(1)
            assert torch.equal(changed, done)


def test_linear_thompson_sampling_learns_a_separable_problem():
    torch.manual_seed(0)
    labels = torch.randint(bandit.ACTIONS, (600,))
    contexts = torch.eye(bandit.ACTIONS)[labels]
    wrong = bandit._play_linear(contexts, labels, bandit.Config(batch_size=5))
    assert sum(wrong[:100]) > 30
    assert sum(wrong[-100:]) < 15


def test_acrobots_move_as_gymnasiums_do():
    task, shape = fig6.TASKS["acrobot"], (2, 3)
    ours, theirs = Acrobots(task, shape), Environments(task, shape)
    generator = np.random.default_rng(0)
    ended, timed_out = np.zeros(shape, bool), np.zeros(shape, bool)
    seeds = generator.integers(1000, size=shape)
    for environments in (ours, theirs):
        environments.reset(seeds)
    for _ in range(task.time_limit):
        # Pushing with the movement swings some of them up; the first one rests.
        actions = np.where(theirs.observed[..., 5] > 0, 2, 0)
        actions[0, 0] = 1
        running = ~ended & ~timed_out
        steps = [environments.step(actions, running) for environments in (ours, theirs)]
        for our_array, their_array in zip(*steps, strict=True):
            np.testing.assert_array_equal(our_array, their_array)
        np.testing.assert_allclose(ours.observed, theirs.observed, atol=1e-5)
        ended |= steps[0].ended
        timed_out |= steps[0].timed_out
    assert timed_out[0, 0]
    assert ended.sum() > 1
