"""The list of the documents' tables and figures, and who is said to have said what."""

import re

import pytest

from zeromean.experiments import registry
from zeromean.experiments.report.notes import PLACEHOLDER, UNKNOWN, fill
from zeromean.experiments.report.records import RecordedClaim, Run
from zeromean.experiments.runs import documents

KEYS = {item.key for item in documents.ITEMS}
# Decimals, shares, factors, counts out of so many: what is measured must be filled in.
RESULT = re.compile(r"\d\.\d|\d\s?(%|×|nat\b|points?\b|per cent)|\d+ of \d")


def test_items_have_keys_of_their_own():
    assert len(KEYS) == len(documents.ITEMS)
    assert {item.document for item in documents.ITEMS} == documents.DOCUMENTS.keys()


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_experiments_cover_items_that_there_are(name):
    assert set(registry.load(name).COVERS) <= KEYS


def test_every_item_is_covered_or_says_why_not():
    covered = registry.covered()
    for item in documents.ITEMS:
        assert (item.key in covered) != bool(item.why_not), item.key


def test_what_is_left_is_listed_by_document():
    left = documents.not_reproduced(registry.covered())
    assert "Appendix F" in [item.place for item in left["Neklyudov et al. (2019)"]]
    assert sum(map(len, left.values())) == sum(bool(item.why_not) for item in documents.ITEMS)
    assert documents.not_reproduced(KEYS) == {}


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_documents_are_cited_with_a_place(name):
    for claim in registry.load(name).CLAIMS:
        if claim.author.document:
            assert claim.author.document in documents.DOCUMENTS
            assert claim.author.place


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("fig4", "worst_single"),
        ("fig9", "explained"),
        ("fig6", "cartpole.best"),
        ("fig6", "acrobot.best"),
        ("fig2", "max_difference.approximation"),
        ("variance_reduction", "student_t_signal_to_noise_at_end"),
        ("sparse_lstm", "accuracy_lost"),
        ("kernel_rvm", "sinc.vector_ratio"),
        ("noises", "Bernoulli.accuracy_averaged"),
    ],
)
def test_bounds_that_no_document_has_are_ours(name, metric):
    authors = {claim.author.key for claim in registry.load(name).CLAIMS if claim.metric == metric}
    assert authors == {documents.OURS}


@pytest.mark.parametrize(
    "name",
    ["linear_large", "linear_real", "compression", "structured_lenet5", "deep_sea", "bandit"],
)
def test_experiments_beyond_the_documents_have_bounds_of_ours_alone(name):
    assert {claim.author.key for claim in registry.load(name).CLAIMS} == {documents.OURS}


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_no_result_is_typed_into_a_note(name):
    experiment = registry.load(name)
    quoted = [f"{number:g}" for row in getattr(experiment, "QUOTED", {}).values() for number in row]
    for note in getattr(experiment, "NOTES", ()):
        words = PLACEHOLDER.sub("", note)
        for number in quoted:  # of a document, from the module's own table
            words = re.sub(rf"(?<![\d.]){re.escape(number)}[%×]", "", words)
        assert not RESULT.search(words), RESULT.search(words)


@pytest.mark.parametrize("text", ["an error of 0.33", "3% of them", "7 of 9 seeds", "12 nat"])
def test_typed_results_are_found(text):
    assert RESULT.search(text)


@pytest.mark.parametrize(
    "text", ["after 200 passes", "Table 1, 2019", "ν = 10⁻¹⁶", "2,000 weights"]
)
def test_settings_are_not_taken_for_results(text):
    assert not RESULT.search(text)


@pytest.mark.parametrize("name", registry.REGISTRY)
def test_placeholders_name_settings_and_claims_that_there_are(name):
    experiment = registry.load(name)
    settings = vars(experiment.Config())
    metrics = {claim.metric for claim in experiment.CLAIMS}
    for note in getattr(experiment, "NOTES", ()):
        for kind, key, _ in PLACEHOLDER.findall(note):
            assert kind != "setting" or key in settings, key
            assert kind != "claim" or key in metrics, key


def test_notes_are_filled_with_means_settings_and_claims():
    runs = [
        Run(
            config={"epochs": 7, "rates": [0.1, 0.2]},
            seed=seed,
            metrics={"net, a.elbo": -3.0 + seed, "share": 0.12345},
            seconds=1.0,
            from_scratch=True,
            command="",
            environment={},
        )
        for seed in range(2)
    ]
    claim = RecordedClaim(
        metric="share",
        label="",
        value=0.5,
        tolerance=0,
        direction="equal",
        unit="",
        author="paper",
        source="",
    )
    text = (
        "{net, a.elbo} {net, a.elbo:.2f} {share:.0%} {setting epochs} {setting rates} "
        "{claim share} {unknown} {setting unknown} {claim unknown}"
    )
    expected = f"−2.5 −2.50 12% 7 0.1, 0.2 0.5 {UNKNOWN} {UNKNOWN} {UNKNOWN}"
    assert fill(text, runs, [claim]) == expected
