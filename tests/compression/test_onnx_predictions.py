"""Random networks as ONNX graphs that predict with uncertainty, in onnxruntime."""

from functools import partial

import pytest
import torch
from torch import nn

import zeromean as zm
from zeromean.export import save_onnx_moments, save_onnx_samples

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
ADDITIVE = {"posterior": partial(zm.Additive, log_variance=-3.0), "prior": None}


def network(*more):
    torch.manual_seed(0)
    first = zm.Conv2d(1, 3, 3, **ADDITIVE), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Flatten(), *more, zm.Linear(12, 4, **ADDITIVE))


def run(path, **inputs):
    session = onnxruntime.InferenceSession(str(path))
    assert [output.name for output in session.get_outputs()] == [
        *("probabilities", "entropy", "variance")
    ]
    return [torch.tensor(part) for part in session.run(None, inputs)]


def test_one_deterministic_graph_predicts_as_moments_do(tmp_path):
    model, path = network(nn.Dropout(0.2)), tmp_path / "moments.onnx"
    save_onnx_moments(model, path, torch.randn(3, 1, 6, 6))
    x = torch.randn(5, 1, 6, 6)  # Another batch size.
    p, entropy, variance = run(path, input=x.numpy())
    # The graph has 1,024 points, where a prediction takes as many as it needs.
    torch.testing.assert_close(p, zm.predict_proba(model, x, method="moments"), atol=2e-3, rtol=0)
    expected = zm.predictive_uncertainty(model, x, method="moments").predictive_entropy
    torch.testing.assert_close(entropy, expected, atol=4e-3, rtol=0)
    samples = zm.sample_outputs(model, x, 4000, seed=0).softmax(-1)
    torch.testing.assert_close(variance.sqrt(), samples.std(0), atol=0.02, rtol=0.15)
    assert torch.equal(run(path, input=x.numpy())[0], p)


@pytest.mark.slow
def test_samples_in_the_graph_are_drawn_anew(tmp_path):
    model, path = network(), tmp_path / "samples.onnx"
    x = torch.randn(3, 1, 6, 6)
    save_onnx_samples(model, path, x, num_samples=16)
    session = onnxruntime.InferenceSession(str(path))
    runs = torch.stack(
        [torch.tensor(session.run(None, {"input": x.numpy()})[0]) for _ in range(100)]
    )
    expected, error = zm.predict_proba(
        model, x, 1600, sampler=zm.weight, seed=0, return_stderr=True
    )
    assert ((runs.mean(0) - expected).abs() < 6 * 2**0.5 * error).all()
    assert runs.std(0).min() > 0


@pytest.mark.slow
def test_the_same_noise_gives_the_same_numbers(tmp_path):
    model, path = network(), tmp_path / "samples.onnx"
    x = torch.randn(3, 1, 6, 6)
    save_onnx_samples(model, path, x, num_samples=4, noise="input")
    noise = zm.draw_noise(model, 4)
    given = {name.replace(".", "_"): drawn.numpy() for name, drawn in noise.items()}
    p, _, variance = run(path, input=x.numpy(), **given)
    each = []
    for index in range(4):
        with zm.held_noise(model.eval(), {name: drawn[index] for name, drawn in noise.items()}):
            each.append(model(x).softmax(-1))
    every = torch.stack(each).detach()
    torch.testing.assert_close(p, every.mean(0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(variance, every.var(0, correction=0), atol=1e-5, rtol=1e-3)
    assert variance.isfinite().all()


def test_what_a_graph_cannot_do_is_refused(tmp_path):
    x, path = torch.randn(3, 4), tmp_path / "no.onnx"
    with pytest.raises(ValueError, match="no stochastic layer, so that all samples were the same"):
        save_onnx_samples(nn.Linear(4, 3), path, x)
    with pytest.raises(ValueError, match="noise must be one of onnx, input, got 'mine'"):
        save_onnx_samples(zm.Linear(4, 3), path, x, noise="mine")
    with pytest.raises(ValueError, match="num_samples must be at least 1, got 0"):
        save_onnx_samples(zm.Linear(4, 3), path, x, num_samples=0)
    with pytest.raises(ValueError, match=r"no rule for the moments of Tensor.cumsum"):
        save_onnx_moments(nn.Sequential(zm.Linear(4, 3), Cumulative()), path, x)
    assert not path.exists()


class Cumulative(nn.Module):
    def forward(self, x):
        return x.cumsum(-1)
