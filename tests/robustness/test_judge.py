"""The judge and the checks: luck is no success, and masked gradients are no robustness."""

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.ensembles import Ensemble
from zeromean.robustness import (
    AdversarialExamples,
    MeanClassifier,
    autoattack,
    checks_table,
    detect,
    eot_pgd,
    evaluate,
    gradient_masking_checks,
    iterative_fast_sign,
    judge,
    random_noise,
)
from zeromean.uncertainty import auroc


class Noisy(nn.Module):
    """Noise on the input that shows in no list of modules."""

    def __init__(self, model, std):
        super().__init__()
        self.model = model
        self.std = std

    def forward(self, x):
        return self.model(x + self.std * torch.randn_like(x))


class Rounded(nn.Module):
    """A network without gradients, and no more robust for it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model((20 * x).round() / 20)


def test_what_stops_at_a_lucky_draw_looks_stronger_to_itself_than_to_the_judge(
    plain, images, labels
):
    pyautoattack = pytest.importorskip("pyautoattack")
    model, epsilon = Noisy(plain, 0.3), 0.1
    theirs = pyautoattack.AutoAttack(
        MeanClassifier(model, 1, seed=0), attacks=["apgd-ce"], version="custom", eps=epsilon, seed=0
    )
    theirs.apgd.n_restarts, theirs.apgd.eot_iter = 1, 5
    found, said = theirs.run_standard_evaluation(images, labels)
    claimed = (said == labels).double().mean().item()
    pgd = eot_pgd(model, images, labels, epsilon=epsilon, num_steps=20)
    judged = judge(model, images, labels, {"theirs": found, "EoT-PGD": pgd}, epsilon=epsilon)
    # By its own numbers about half of the images are fooled. With fresh noise most of these are
    # classified correctly again, and the plain attack, which did not stop, is the stronger one.
    assert judged.accuracy("theirs") > claimed + 0.2
    assert judged.accuracy("EoT-PGD") < judged.accuracy("theirs") - 0.1
    assert judged.robust_accuracy <= judged.accuracy("EoT-PGD")
    # Asked for its points of the highest loss, it is as strong.
    (kept,) = autoattack(model, images, labels, epsilon=epsilon, attacks=["apgd-ce"], num_steps=20)
    apgd = judge(model, images, labels, kept).robust_accuracy
    assert apgd < judged.accuracy("theirs") - 0.1
    assert apgd == pytest.approx(judged.accuracy("EoT-PGD"), abs=0.1)


def test_the_worst_attack_of_every_image_counts():
    model = nn.Linear(1, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        model.bias.copy_(torch.tensor([0.5, -0.5]))
    x = torch.tensor([[0.4], [0.4], [0.4], [0.9]])
    labels = torch.tensor([0, 0, 0, 0])
    made = {
        "first": torch.tensor([[0.6], [0.4], [0.4], [0.9]]),
        "second": torch.tensor([[0.4], [0.6], [0.4], [0.9]]),
    }
    judged = judge(model, x, labels, made)
    assert judged.clean.tolist() == [True, True, True, False]
    assert judged.accuracy("first") == judged.accuracy("second") == 0.5
    assert judged.robust.tolist() == [False, False, True, False]
    assert judged.robust_accuracy == 0.25
    assert "worst for each image     25.0%" in str(judged)
    aimed = AdversarialExamples(
        made["first"], "aimed", None, 1, 1, targets=torch.tensor([1, 1, 1, 1])
    )
    judged = judge(model, x, labels, [aimed, aimed])
    assert judged.success("aimed") == 0.5
    assert list(judged.correct) == ["aimed", "aimed (2)"]


def test_a_judge_has_more_draws_than_the_attack_and_looks_at_distances(variance, images, labels):
    made = eot_pgd(variance, images, labels, epsilon=0.1, num_steps=2, num_samples=30)
    assert judge(variance, images, labels, made).num_samples == 150
    with pytest.raises(ValueError, match=r"more draws than the attack.*30, got num_samples=30"):
        judge(variance, images, labels, made, num_samples=30)
    with pytest.raises(ValueError, match=r"EoT-PGD moved a pixel by 0\.1.*epsilon=0\.05"):
        judge(variance, images, labels, made, epsilon=0.05)
    with pytest.raises(ValueError, match="50 images of the shape"):
        judge(variance, images, labels, {"half": images[:25]})
    with pytest.raises(ValueError, match=r"what far made must lie in \[0, 1\]"):
        judge(variance, images, labels, {"far": images + 1})
    with pytest.raises(TypeError, match="attacked must be"):
        judge(variance, images, labels, images)
    with pytest.raises(TypeError, match="x must be AdversarialExamples, got 3"):
        judge(variance, images, labels, {"x": 3})


def test_success_by_step_of_a_random_network_is_what_the_judge_finds(variance, images, labels):
    targets = (labels + 3) % 10
    made = iterative_fast_sign(
        variance, images, labels, targets, num_steps=15, step=0.02, num_samples=40
    )
    judged = judge(variance, images, labels, made)
    assert judged.success("iterative fast sign") == pytest.approx(
        made.success_by_step[-1].item(), abs=0.1
    )
    assert made.success_by_step[0] < 0.1 < made.success_by_step[-1]


@pytest.mark.parametrize("kind", ["plain", "variance"])
def test_sound_gradients_pass_every_check(kind, images, labels, request):
    pytest.importorskip("pyautoattack")
    model = request.getfixturevalue(kind)
    report = evaluate(model, images, labels, epsilon=0.08, attacks=["apgd-ce"], num_steps=16)
    assert not report.suspicious, str(report)
    verdicts = [check.verdict for check in report.checks]
    assert verdicts.count("ok") == (4 if kind == "plain" else 5)
    assert "suspicious" not in str(report)
    assert list(report.judgement.correct)[1] == "apgd-ce"


def test_a_report_tells_once_that_there_is_no_noise(plain, images, labels):
    with pytest.warns(UserWarning, match="draws no noise") as told:
        evaluate(plain, images, labels, epsilon=0.05, num_steps=4, num_samples=5, num_queries=5)
    assert len(told) == 1


def test_masked_gradients_are_suspicious(plain, images, labels):
    pytest.importorskip("pyautoattack")
    report = evaluate(Rounded(plain), images, labels, epsilon=0.15, num_steps=8, num_queries=400)
    found = {check.name for check in report.suspicious}
    assert "white box is not weaker than black box" in found
    assert "without a bound it reaches 100%" in found
    assert "suspicious: not so: white box is not weaker" in str(report)


def test_what_cannot_be_checked_says_why(plain, images, labels, monkeypatch):
    monkeypatch.setattr("zeromean.robustness.checks.find_spec", lambda name: None)
    checks = gradient_masking_checks(plain, images, labels, epsilon=0.05, num_steps=8)
    skipped = {check.name: check.reason for check in checks if check.verdict == "not run"}
    assert "pip install '.[attacks]'" in skipped["white box is not weaker than black box"]
    assert skipped["success rises with samples"] == "the model draws no noise"
    assert "not run" in checks_table(checks)


def test_an_ensemble_is_reported_on_like_a_network(plain, variance, images, labels):
    few, y = images[:12], labels[:12]
    report = evaluate(Ensemble([plain]), few, y, epsilon=0.1, num_steps=8, num_queries=50)
    assert report.judgement.num_samples == 1
    report = evaluate([plain, variance], few, y, epsilon=0.1, num_steps=8, num_queries=50)
    assert report.judgement.num_samples == 100


def test_random_noise_stays_in_its_ball(images):
    made = random_noise(images, 0.1)
    assert (made.images - images).abs().amax() <= 0.1 + 1e-6
    assert made.images.amin() >= 0
    assert made.images.amax() <= 1
    assert torch.equal(made.images, random_noise(images, 0.1).images)


def test_uncertainty_notices_what_an_unaware_attack_makes(variance, plain, images, labels):
    made = eot_pgd(variance, images, labels, epsilon=0.1, num_steps=10)
    found = detect(variance, images, made)
    uncertainty = [zm.predictive_uncertainty(variance, x, 50) for x in (images, made.images)]
    entropy = auroc(*(each.predictive_entropy for each in uncertainty))
    assert found.entropy == pytest.approx(entropy, abs=0.05)
    assert found.mutual_information > 0.6
    assert detect(plain, images, images).entropy == 0.5
    assert detect(plain, images, made).mutual_information == 0.5
