"""transformers' Trainer with the mixin, next to a bare loop; random weights, no downloads."""

import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zeromean as zm

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from zeromean.training import ElboTrainerMixin  # noqa: E402

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 12, "pad_token_id": 0}
SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class ElboTrainer(ElboTrainerMixin, transformers.Trainer):
    pass


def classifier(labels=3):
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SMALL, num_labels=labels)
    )


def language_model():
    config = transformers.GPT2Config(
        vocab_size=30, n_positions=12, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def examples(count=8, length=6):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (count, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(count):  # Padded to one length.
        mask[row, length - row % 3 :] = 0
    ids = ids * mask
    labels = torch.randint(3, (count,), generator=generator)
    return ids, mask, labels


def dataset():
    rows = zip(*examples(), strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in rows]


def trainer(model, tmp_path, train=None, *, arguments=None, **options):
    arguments = {
        "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_steps": 2,
        "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_grad_norm": 0,
        "use_cpu": True, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "dataloader_pin_memory": False, **(arguments or {}),
    }  # fmt: skip
    arguments = transformers.TrainingArguments(str(tmp_path), **arguments)
    return ElboTrainer(model=model, args=arguments, train_dataset=train, **options)


def stochastic(model, sampler=zm.mean):
    # Without noise both loops compute the same; the KL is there all the same.
    zm.make_stochastic_(model, prior=zm.Normal(scale=0.1), sampler=sampler)
    return model


@pytest.mark.parametrize("accumulate", [1, 4])
def test_steps_are_those_of_a_bare_loop(accumulate, tmp_path):
    model = stochastic(classifier())
    bare = copy.deepcopy(model)
    beta = zm.linear_warmup(steps=4)
    arguments = {
        "per_device_train_batch_size": 8 // accumulate,
        "gradient_accumulation_steps": accumulate,
    }
    run = trainer(model, tmp_path, dataset(), arguments=arguments, beta=beta)
    run.train()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    ids, mask, labels = examples()
    for step in range(2):
        logits = bare(input_ids=ids, attention_mask=mask).logits
        kl = zm.kl_divergence(bare)
        loss = zm.elbo_loss(F.cross_entropy(logits, labels), kl, num_data=8, beta=beta(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, theirs in zip(model.parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    logs = [log for log in run.state.log_history if "loss" in log]
    assert all(log["kl"] > 0 for log in logs)
    assert logs[-1]["kl"] == pytest.approx(kl.item())


def test_kl_counts_once_where_the_loss_is_a_mean_over_all_tokens_of_a_step(tmp_path):
    ids = examples()[0].clamp_min(1)
    rows = [{"input_ids": i, "labels": i} for i in ids]
    model = language_model()
    zm.make_stochastic_(model, prior=zm.Normal(scale=0.1), sampler=zm.mean)
    whole = copy.deepcopy(model)
    trainer(whole, tmp_path, rows).train()
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    trainer(model, tmp_path, rows, arguments=arguments).train()
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_evaluation_averages_probabilities_over_draws(tmp_path):
    model = stochastic(classifier(), zm.weight)
    for layer in zm.stochastic_layers(model).values():
        layer.weight.log_variance.data.fill_(-2.0)
    seen = []

    def metrics(prediction):
        seen.append(prediction)
        return {}

    run = trainer(model, tmp_path, num_samples=200, compute_metrics=metrics)
    logged = run.evaluate(dataset())
    ids, mask, labels = examples()
    averaged = torch.as_tensor(seen[0].predictions).exp()
    torch.testing.assert_close(averaged.sum(-1), torch.ones(8))
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected, error = zm.predict_proba(model, inputs, 200, seed=1, return_stderr=True)
    assert ((averaged - expected).abs() < 5 * 2**0.5 * error + 1e-4).all()
    # The loss is the data term of a draw on average, without the KL.
    draws = zm.sample_outputs(model, inputs, 200, seed=2)
    nll = torch.stack([F.cross_entropy(draw, labels) for draw in draws])
    assert abs(logged["eval_loss"] - nll.mean()) < 5 * nll.std() * (2 / 200) ** 0.5


def test_regression_averages_outputs(tmp_path):
    model = stochastic(classifier(labels=1))
    rows = [{**row, "labels": row["labels"].float()} for row in dataset()]
    predicted = trainer(model, tmp_path, num_samples=3).predict(rows).predictions
    ids, mask, _ = examples()
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(torch.as_tensor(predicted), expected.detach())


def test_checkpoints_hold_posteriors_and_training_resumes_from_them(tmp_path):
    def build():
        torch.manual_seed(0)
        return stochastic(classifier())

    arguments = {"save_strategy": "steps", "save_steps": 1, "optim": "sgd"}
    through = build()
    trainer(through, tmp_path / "a", dataset(), arguments=arguments).train()
    checkpoint = tmp_path / "a" / "checkpoint-1"
    resumed = build()
    run = trainer(resumed, tmp_path / "a", dataset(), arguments=arguments)
    run.train(resume_from_checkpoint=str(checkpoint))
    for mine, theirs in zip(resumed.parameters(), through.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    plain = transformers.AutoModelForSequenceClassification.from_config(config)
    loaded = zm.load(checkpoint / "model.safetensors", plain)
    assert loaded.bert.pooler.dense.weight.log_variance.shape == (16, 16)
    with pytest.raises(TypeError, match="save_pretrained would lose the posteriors"):
        resumed.save_pretrained(tmp_path)


def test_weight_decay_leaves_the_noise_alone(tmp_path):
    model = stochastic(classifier())
    names = trainer(model, tmp_path, dataset()).get_decay_parameter_names(model)
    assert "bert.pooler.dense.weight.mean" in names
    assert not [name for name in names if "log_variance" in name]


def test_a_dataset_without_a_length_needs_num_data(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from dataset()

    with pytest.raises(ValueError, match="say num_data="):
        trainer(classifier(), tmp_path, Stream())
    assert trainer(classifier(), tmp_path, Stream(), num_data=8).num_data == 8


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_conversion_keeps_predictions_and_inputs_are_dicts(kind):
    model = classifier()
    if kind == "distilbert":
        config = transformers.DistilBertConfig(
            vocab_size=30, dim=16, hidden_dim=32, n_layers=1, n_heads=2, num_labels=3,
            max_position_embeddings=12, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
        )  # fmt: skip
        model = transformers.DistilBertForSequenceClassification(config)
    model.eval()
    ids, mask, _ = examples()
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = model(**inputs).logits.softmax(-1)
    report = zm.make_stochastic_(model)
    assert any(name.endswith(("query", "q_lin")) for name in report.converted)
    assert report.keeps_predictions
    probabilities = zm.predict_proba(model, inputs, seed=0)
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=0.02)
    by_parts = zm.predict_proba(model, inputs, seed=0, batch_size=3)
    torch.testing.assert_close(by_parts, expected, rtol=0, atol=0.02)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(**inputs).logits.softmax(-1), expected)
    uncertainty = zm.predictive_uncertainty(model, inputs, 5)
    assert uncertainty.mutual_information.shape == (8,)


def test_blocks_around_torchs_attention_function_convert():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3)
            mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
            return {"logits": self.out(mixed.transpose(1, 2).flatten(2).mean(1))}

    model, x = Block(), torch.randn(4, 5, 8)
    expected = model(x)["logits"]
    zm.make_stochastic_(model)
    with zm.sampling(model, zm.mean):
        torch.testing.assert_close(model(x)["logits"], expected)
    samples = zm.sample_outputs(model, x, 4)
    assert samples.std(0).min() > 0
