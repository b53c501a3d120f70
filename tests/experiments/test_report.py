"""The report: its verdicts, its page, its refusals, and how a browser draws it."""

import copy
import json
import math
import random
import re
import shutil
import sys
from html.parser import HTMLParser

import pytest
from matplotlib import image

from browser import ask, needs_chromium
from zeromean.experiments.report import Registry, build, build_markdown
from zeromean.experiments.report.figures import describe, plot
from zeromean.experiments.report.formats import (
    format_flags,
    format_measured,
    format_number,
    format_seconds,
    format_seeds,
    format_setting,
    format_summary,
    with_unit,
)
from zeromean.experiments.report.records import RecordedClaim, Run, read_record
from zeromean.experiments.report.verdicts import Measured, Summary, judge, measure, summarize
from zeromean.experiments.runs.checksum import sealed

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

KNOWN = {
    "fig1": "Toy problem: what a variance layer stores",
    "fig2": "KL to the priors against α",
    "table1": "LeNet-5 under five posteriors",
    "variance": "Variance of the gradient",
    "fig7": "Targeted attacks on CIFAR-10",
}


def environment(**changes) -> dict:
    return {"commit": "1f0c2ab", "python": "3.11.2", "torch": "2.13.0", "threads": 1} | changes


def curve(name, function, xs, *, error=None, kind="line") -> dict:
    trace = {"name": name, "kind": kind, "x": xs, "y": [function(x) for x in xs]}
    return trace | ({"error": [error(x) for x in xs]} if error else {})


def made_up_records() -> list[dict]:
    """Three experiments that look like real ones; none of their numbers was measured."""
    draw = random.Random(0)
    alphas = [10 ** (-3 + 0.1 * step) for step in range(71)]
    fig2 = {
        "name": "fig2",
        "title": "KL to the priors against α",
        "source": "Neklyudov et al. 2019, Fig. 2",
        "command": "zeromean run fig2",
        "runs": [
            {
                "config": {"log_alpha_min": -7.0, "log_alpha_max": 9.0, "points": 71},
                "seed": 0,
                "metrics": {"kl_at_largest_alpha": 3.1e-5, "approximation_gap": 0.00912},
                "seconds": 3.2,
                "environment": environment(),
            }
        ],
        "claims": [
            {
                "metric": "kl_at_largest_alpha",
                "label": "KL to the log-uniform prior at the largest α",
                "value": 0,
                "tolerance": 0.001,
                "direction": "equal",
                "unit": "nat",
                "author": "paper",
                "source": "Fig. 2",
            },
            {
                "metric": "approximation_gap",
                "label": "Largest error of the fitted approximation",
                "value": 0.009,
                "tolerance": 0,
                "direction": "at most",
                "unit": "nat",
                "author": "ours",
                "source": "ours: measured before",
            },
        ],
        "figures": [
            {
                "title": "KL divergence to each prior",
                "x_label": "α",
                "y_label": "KL, nats a weight",
                "x_log": True,
                "y_log": False,
                "traces": [
                    curve("log-uniform, exact", lambda a: 0.5 * math.log1p(1 / a), alphas),
                    curve("log-uniform, fitted", lambda a: 0.52 * math.log1p(0.9 / a), alphas),
                    curve("ARD", lambda a: 0.5 * math.log1p(1 / a) + 0.02, alphas),
                    curve("Student-t, ν = 0.1", lambda a: 0.45 * math.log1p(2 / a), alphas),
                    curve("Student-t, ν = 1", lambda a: 0.4 * math.log1p(5 / a) + 0.1, alphas),
                ],
            }
        ],
        "deterministic": True,
        "notes": "The exact curve is computed with Dawson’s function.\n\nν < 1 has no mean; the "
        "fit is off by {approximation_gap} nat at {setting points} points.",
    }
    kinds = ["zero-mean", "layer", "neuron", "weight", "additive"]
    published = [-4.0, -17.4, -31.4, -602.6, -227.9]
    config = {
        "epochs": 200,
        "batch_size": 200,
        "lr": 0.001,
        "clip_log_alpha": [-8.0, 10.0],
        "posterior": "zero_mean",
        "data": "mnist",
    }

    def run(seed, epochs):
        metrics = {"zero_mean_accuracy": 99.38 + draw.gauss(0, 0.04)}
        metrics["mean_propagation_accuracy"] = 11.3 + draw.gauss(0, 0.02)
        metrics["layer_elbo"] = -12.4 + draw.gauss(0, 0.6)
        metrics["weight_accuracy"] = 98.7 + draw.gauss(0, 0.03)
        metrics["additive_accuracy"] = 98.9 + draw.gauss(0, 0.2)
        metrics["history"] = [1.0, 2.0]
        return {
            "config": config | {"epochs": epochs, "seed": seed},
            "seed": seed,
            "metrics": metrics,
            "seconds": 21.5 * epochs + seed,
            "environment": environment(threads=1 if seed < 3 else 2),
            "size": "full" if epochs == 200 else "custom",
        }

    def claim(metric, label, value, tolerance, direction, unit="%"):
        return {
            "metric": metric,
            "label": label,
            "value": value,
            "tolerance": tolerance,
            "direction": direction,
            "unit": unit,
            "author": "paper",
            "source": "Table 1",
        }

    epochs = list(range(1, 201))
    table1 = {
        "name": "table1",
        "title": "LeNet-5 under five posteriors",
        "source": "Neklyudov et al. 2019, Table 1",
        "command": "zeromean run table1 --epochs 200 --seeds 0 1 2 3 4 --jobs 2 --data-dir data",
        "runs": [run(seed, 200) for seed in range(5)] + [run(0, 5)],
        "claims": [
            claim("zero_mean_accuracy", "Averaged accuracy, zero-mean", 99.4, 0.15, "at least"),
            claim("mean_propagation_accuracy", "Mean propagation, zero-mean", 11.3, 1.0, "equal"),
            claim("layer_elbo", "ELBO, layer-wise α", -17.4, 2, "equal", ""),
            claim("weight_accuracy", "Averaged accuracy, weight-wise α", 99.4, 0.15, "at least"),
            claim("additive_accuracy", "Averaged accuracy, additive", 99.2, 0.15, "at least"),
        ],
        "figures": [
            {
                "title": "Test accuracy while training",
                "x_label": "Epoch",
                "y_label": "Averaged accuracy, %",
                "traces": [
                    curve(
                        f"{kind}, averaged over 20 samples",
                        lambda epoch, i=index: 99.4 - 0.1 * i - 9 * math.exp(-epoch / (8 + 3 * i)),
                        epochs,
                        error=lambda epoch: 0.05 + 2 * math.exp(-epoch / 20),
                    )
                    for index, kind in enumerate(kinds[:3])
                ],
            },
            {
                "title": "ELBO by posterior",
                "x_label": "Posterior",
                "y_label": "−ELBO",
                "y_log": True,
                "traces": [
                    {"name": "paper", "kind": "bar", "x": kinds, "y": [-e for e in published]},
                    {
                        "name": "ours",
                        "kind": "bar",
                        "x": kinds,
                        "y": [-0.8 * elbo for elbo in published],
                        "error": [-0.05 * elbo for elbo in published],
                    },
                ],
            },
            {
                "title": "log α of the weights in weight-wise and additive runs",
                "x_label": "log α",
                "y_label": "Weights",
                "traces": [
                    {
                        "name": name,
                        "kind": "histogram",
                        "x": [round(draw.gauss(centre, spread), 3) for _ in range(800)],
                    }
                    for name, centre, spread in [("weight", 6.0, 1.5), ("additive", 2.5, 2.5)]
                ],
            },
        ],
        "notes": "",
    }
    variance = {
        "name": "variance",
        "title": "Variance of the gradient under three reparameterizations",
        "source": "Lecture 3",
        "command": "zeromean run variance --seeds 0 1 2",
        "runs": [],
        "claims": [claim("ratio", "Gradient variance, RT over LRT", 1, 0, "at least", "×")],
        "figures": [
            {
                "title": "One draw against another",
                "x_label": "First",
                "y_label": "Second </script><b>& more</b>",
                "traces": [
                    {
                        "name": "draws, α < 1 & ν > 0",
                        "kind": "scatter",
                        "x": [draw.gauss(0, 1) for _ in range(300)],
                        "y": [draw.gauss(0, 1) for _ in range(299)] + [None],
                    },
                    curve("mean", lambda x: 0.1 * x, [-2, -1, 0, 1, 2], error=lambda x: 0.3),
                ],
            },
            {
                "title": "A patch of the weights",
                "x_label": "Input",
                "y_label": "Neuron",
                "traces": [
                    {
                        "name": "weights",
                        "kind": "image",
                        "rows": [
                            [draw.gauss(0, 1) * (i == j) for i in range(30)] for j in range(20)
                        ],
                    }
                ],
            },
        ],
    }
    return [fig2, table1, variance]


def write_records(folder, records=None):
    folder.mkdir(parents=True, exist_ok=True)
    for record in made_up_records() if records is None else records:
        (folder / f"{record['name']}.json").write_text(json.dumps(record), "utf-8")
    return folder


class Page(HTMLParser):
    """The text, the identifiers and the links of a page, scripts and style left out."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.identifiers, self.links, self.tags, self._skipping = "", [], [], [], False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        self._skipping = tag in ("script", "style")
        if "id" in attributes:
            self.identifiers.append(attributes["id"])
        self.links += [attributes[key] for key in ("href", "src") if key in attributes]

    def handle_endtag(self, tag):
        self._skipping = False

    def handle_data(self, data):
        if not self._skipping:
            self.text = " ".join([*self.text.split(), *data.split()])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return build(write_records(folder / "results"), folder / "out" / "report.html", KNOWN)


@pytest.fixture(scope="module")
def page(path) -> Page:
    return Page(path.read_text("utf-8"))


def a_claim(direction="at least", value=99.4, tolerance=0.15, **changes) -> RecordedClaim:
    return RecordedClaim(
        metric="m",
        label="l",
        value=value,
        tolerance=tolerance,
        direction=direction,
        unit="",
        author="paper",
        source="",
        **changes,
    )


def a_run(seed=0, config=None, **metrics) -> Run:
    return Run(
        config=config or {},
        seed=seed,
        metrics=metrics,
        seconds=1.0,
        from_scratch=True,
        command="",
        environment={},
    )


@pytest.mark.parametrize(
    ("direction", "values", "expected"),
    [
        ("at least", [99.25], "seen once"),  # on the bound, which binary numbers miss
        ("at least", [99.2], "not seen"),
        ("at least", [99.9, 99.8], "seen twice"),
        ("at least", [99.9, 99.0], "seen once"),
        ("at least", [99.25, 99.25, 99.25], "confirmed"),
        ("at least", [99.5, 99.6, 99.55], "confirmed"),
        ("at least", [99.3, 99.6, 99.0], "open"),
        ("at least", [98.5, 98.6, 98.55], "refuted"),
        ("at most", [99.5, 99.52, 99.51], "confirmed"),
        ("at most", [99.9, 99.92, 99.91], "refuted"),
        ("equal", [99.4, 99.42, 99.41], "confirmed"),
        ("equal", [99.9, 99.92, 99.91], "refuted"),
        ("equal", [99.54, 99.56, 99.55], "open"),  # the mean is inside, the interval is not
        ("equal", [math.nan], "not seen"),
        ("equal", [99.4, 99.4, math.nan], "open"),  # a seed that failed is not left out
    ],
)
def test_verdict_takes_three_seeds_and_the_whole_interval(direction, values, expected):
    runs = [a_run(seed, m=value) for seed, value in enumerate(values)]
    claim = a_claim(direction)
    assert judge(claim, measure(claim, runs)) == expected


def test_one_run_is_enough_where_nothing_is_random():
    claim = a_claim()
    assert judge(claim, measure(claim, [a_run(m=99.3)], deterministic=True)) == "confirmed"
    assert judge(claim, measure(claim, [a_run(m=99.0)], deterministic=True)) == "refuted"


def test_a_median_takes_six_seeds_and_does_not_mind_an_outlier():
    values = [99.5, 99.6, 99.5, 99.7, 99.6, 99.5, 99.6, 20.0]
    runs = [a_run(seed, m=value) for seed, value in enumerate(values)]
    claim = a_claim(statistic="median")
    assert judge(claim, measure(claim, runs[:5])) == "open"
    assert judge(claim, measure(claim, runs)) == "confirmed"
    assert judge(a_claim(), measure(a_claim(), runs)) == "open"


@pytest.mark.parametrize(
    ("low", "high", "seeds", "expected"),
    [
        (1.0, 2.0, 9, "confirmed"),
        (-2.0, -1.0, 9, "refuted"),
        (-1.0, 1.0, 9, "open"),
        (1.0, 2.0, 2, "not seen"),
    ],
)
def test_runs_with_seeds_of_their_own_are_judged_by_their_interval(low, high, seeds, expected):
    claim = a_claim(value=0.0, tolerance=0.0, seeds_in_run="num_seeds")
    run = a_run(config={"num_seeds": seeds}, **{"m.low": low, "m.high": high})
    found = measure(claim, [run])
    assert judge(claim, found) == expected
    assert found is not None
    assert found.count == seeds


def test_nothing_measured_is_no_verdict():
    assert summarize([]) is None
    assert measure(a_claim(), [a_run(other=1.0)]) is None
    assert judge(a_claim(), None) == "not measured"


def test_standard_error_is_that_of_the_mean():
    assert summarize([1.0, 2.0, 3.0]) == Summary(2.0, pytest.approx(1 / math.sqrt(3)), 3)
    assert summarize([1.0]) == Summary(1.0, None, 1)
    assert math.isnan(summarize([1.0, math.nan]).mean)


def test_numbers_read_well():
    assert format_number(-99.4) == "−99.4"
    assert format_number(0) == "0"
    assert format_number(100_000) == "100000"
    assert format_number(-0.0000123) == "−1.23×10⁻⁵"
    assert format_number(math.inf) == "∞"
    assert format_summary(Summary(99.3812, 0.0234, 5)) == "99.381 ± 0.023"
    assert format_summary(Summary(-602.61, 33.8, 5)) == "−603 ± 34"
    assert format_summary(Summary(5.0, 0.0, 5)) == "5 ± 0"
    assert format_summary(Summary(5.0, 1.2e-17, 5)) == "5 ± 1.2×10⁻¹⁷"
    assert format_summary(Summary(1e-8, 2e-9, 5)) == "1×10⁻⁸ ± 2×10⁻⁹"
    assert format_measured(Measured((99.4, 99.3), 99.35, None, 2)) == "99.4; 99.3"
    assert format_measured(Measured((1.0,) * 3, 1.0, (1.0, 1.0), 3)) == "1"
    three = Measured((99.35, 99.38, 99.41), 99.38, (99.3061, 99.4539), 3)
    assert format_measured(three) == "99.380 [99.306, 99.454]"
    assert format_measured(Measured((), None, (-12.58, -1.62), 9)) == "[−12.6, −1.6]"
    assert format_measured(None) == "—"
    assert with_unit("280", "×") == "280×"
    assert with_unit("99", "%") == "99\u202f%"
    assert [format_seconds(s) for s in (3.21, 250, 7512)] == ["3.2 s", "4 min 10 s", "2 h 05 min"]
    assert format_seeds([7, 0, 1, 2, 4, 5]) == "0–2, 4, 5, 7"


def test_page_counts_documents_and_ourselves_apart(page):
    assert "3 of 6 claims of the documents confirmed ✓ confirmed 3 ✗ refuted 3" in page.text
    assert "0 of 1 bound of our own confirmed ✗ refuted 1" in page.text
    assert "3 experiments not run." in page.text


def test_claims_stand_next_to_our_numbers_with_seeds_and_command(page):
    command = "zeromean run table1 --epochs 200 --seeds 0 1 2 3 4 --jobs 2 --data-dir data"
    assert command in page.text
    assert "Seeds 0–4 · 200 epochs · 5 h 58 min, 1 h 11 min each" in page.text
    row = page.text[page.text.index("Averaged accuracy, zero-mean Table 1") :]
    pattern = r".* ≥ 99\.4 % 99\.\d+ \[99\.\d+, 99\.\d+\] % n = 5 ✓ confirmed ≥ 99\.25 %"
    assert re.match(pattern, row[:140])


def test_documents_and_ourselves_have_tables_of_their_own(page):
    fig2 = page.text[page.text.index("zeromean run fig2") :]
    fig2 = fig2[: fig2.index("zeromean run table1")]
    theirs, ours = fig2.index("Claims of the documents"), fig2.index("Bounds of our own")
    assert theirs < fig2.index("KL to the log-uniform prior at the largest α Fig. 2") < ours
    assert ours < fig2.index("Largest error of the fitted approximation ours: measured before")


def test_numbers_in_notes_are_those_of_the_runs(page):
    assert "the fit is off by 0.00912 nat at 71 points." in page.text


def test_configurations_are_not_averaged_together_nor_judged_at_another_size(page):
    assert "Also run: configuration 2 epochs = 5" in page.text
    assert "custom size · Seed 0" in page.text
    assert page.text.count("n = 5") == 5
    assert page.text.count("n = 1") == 2 + 5
    other = page.text[page.text.index("Also run: configuration 2") :]
    assert other.count("○ not judged") == 5


def table1_runs(**changes):
    record = made_up_records()[1]
    record["runs"] = [run | changes for run in record["runs"][:5]]
    return record


def shown_text(tmp_path, record, known=Registry()):
    output = build(write_records(tmp_path / "results", [record]), tmp_path / "r.html", known)
    return Page(output.read_text("utf-8")).text


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({"environment": {"commit": "unknown"}}, "no clean commit"),
        ({"environment": {"commit": "1f0c2ab+"}}, "no clean commit"),
        ({"lost": True}, "its commit does not exist"),
        ({"own": True}, "own run, not in the records"),
    ],
)
def test_runs_of_doubtful_origin_are_marked(tmp_path, changes, mark):
    assert mark not in shown_text(tmp_path, table1_runs())
    text = shown_text(tmp_path, table1_runs(**changes))
    assert f"To be taken with care: {mark}." in text
    assert "5 of the verdicts on documents come from runs that are marked" in text


def test_runs_of_an_older_version_are_stale_and_have_no_notes(tmp_path):
    record = table1_runs() | {"notes": "It is {layer_elbo}."}
    assert "It is −12." in shown_text(tmp_path, record)
    stale = "stale: version 1 of the experiment, which is at 2"
    text = shown_text(tmp_path, record, Registry(versions={"table1": 2}))
    assert stale in text
    assert "It is" not in text
    assert stale in shown_text(tmp_path, record | {"version": 2})
    assert stale not in shown_text(tmp_path, table1_runs(version=2) | {"version": 2})


def test_record_that_was_changed_by_hand_says_so(tmp_path):
    record = sealed(table1_runs())
    assert "changed by hand" not in shown_text(tmp_path, record)
    record["runs"][0]["metrics"]["layer_elbo"] += 1
    assert "changed by hand: table1.json" in shown_text(tmp_path, record)


def test_runs_of_another_size_have_a_badge_and_no_verdict(tmp_path):
    text = shown_text(tmp_path, table1_runs(size="quick"))
    assert "quick size · Seeds 0–4" in text
    assert "○ not judged" in text
    assert "No claim has been measured yet" in text


def test_tries_are_shown_folded_away(tmp_path):
    record = table1_runs()
    record["tries"] = [{"command": "", "runs": [run | {"seconds": 1} for run in record["runs"]]}]
    output = build(write_records(tmp_path / "results", [record]), tmp_path / "r.html")
    html = output.read_text("utf-8")
    assert "Earlier tries at full size 1" in Page(html).text
    details = html[html.index("Earlier tries at full size") :]
    assert html[: html.index("Earlier tries at full size")].endswith(
        '<details class="other">\n<summary>'
    )
    assert "Averaged accuracy, zero-mean" in details
    assert "5 claims of the documents" in Page(html).text  # Those of the try do not count.
    build_markdown(tmp_path / "results", tmp_path / "docs" / "results.md")
    markdown = (tmp_path / "docs" / "results.md").read_text("utf-8")
    assert '<details markdown="1"><summary>Earlier tries: 1</summary>' in markdown


def test_text_where_a_try_has_a_number_is_named(tmp_path):
    record = table1_runs()
    tried = copy.deepcopy(record["runs"])
    tried[1]["metrics"]["layer_elbo"] = "text"
    record["tries"] = [{"command": "", "runs": tried}]
    folder = write_records(tmp_path / "results", [record])
    sentences = []
    build(folder, tmp_path / "page.html", on_damage=sentences.append)
    (sentence,) = sentences
    assert f"{folder / record['name']}.json: tries[0].runs[1].metrics.layer_elbo" in sentence


def test_own_runs_stand_next_to_those_of_a_record(tmp_path):
    record = table1_runs()
    record["runs"] += [
        run | {"own": True, "metrics": {"layer_elbo": 0.0}} for run in record["runs"]
    ]
    text = shown_text(tmp_path, record)
    assert "Also run: configuration 2" in text
    assert text.count("n = 5") == 5 + 1
    assert "2 of 5 claims of the documents confirmed" in text


def test_what_is_not_reproduced_is_listed(tmp_path):
    missing = {"A paper": [("Figure 7", "attacks", "no GPU")]}
    known = Registry(missing=missing)
    assert "Figure 7: attacks (no GPU)" in shown_text(tmp_path, table1_runs(), known)
    build_markdown(tmp_path / "results", tmp_path / "docs" / "results.md", known)
    markdown = (tmp_path / "docs" / "results.md").read_text("utf-8")
    assert "**A paper**\n\n- Figure 7: attacks (no GPU)." in markdown


def test_what_has_not_been_run_at_full_size_is_not_reproduced_either(tmp_path):
    covers = {
        "table1": [("A paper", "Table 1", "ELBO")],
        "fig7": [("A paper", "Figure 7", "attacks"), ("A paper", "Table 1", "ELBO")],
    }
    text = shown_text(tmp_path, table1_runs(), Registry(covers=covers))
    listed = text[text.index("Not reproduced") :]
    assert "Figure 7: attacks (the experiment `fig7` has not been run at full size)" in listed
    assert "Table 1: ELBO" not in listed
    quick = table1_runs(size="quick")
    text = shown_text(tmp_path, quick, Registry(covers=covers))
    why = "the experiments `table1`, `fig7` have not been run at full size"
    assert f"Table 1: ELBO ({why})" in text


def test_first_screen_counts_by_document_and_says_what_is_refuted(path, tmp_path):
    output = build_markdown(path.parents[1] / "results", tmp_path / "results.md", KNOWN)
    first = output.read_text("utf-8").partition("## By experiment")[0]
    judged = "| claims of | judged | confirmed | refuted | open | seen twice | seen once |"
    assert first.index(judged) < first.index("Refuted, of the documents' claims:")
    assert "| **all documents** | **6** | **3** | **3** |" in first
    assert "| **bounds of our own** | **1** | **0** | **1** |" in first
    refuted = r"^- \[\w+\]\(#experiment-\w+\): .* said, .* measured$"
    assert len(re.findall(refuted, first, re.MULTILINE)) == 3


def test_missing_run_says_how_to_run_it(page):
    assert "Toy problem: what a variance layer stores # ○ not run Run it with" in page.text
    assert "zeromean run fig7" in page.text
    assert "Gradient variance, RT over LRT Table 1 ≥ 1× — ○ not run ≥ 1×" in page.text


def test_experiments_come_in_the_order_in_which_they_are_known(page):
    sections = [attributes["id"] for tag, attributes in page.tags if tag == "section"]
    assert sections == list(KNOWN)


def test_unknown_records_come_last_and_fig10_after_fig2(tmp_path):
    records = [made_up_records()[0] | {"name": name} for name in ("fig10", "fig2", "a")]
    output = build(write_records(tmp_path / "results", records), tmp_path / "r.html", {"z": "Z"})
    tags = Page(output.read_text("utf-8")).tags
    assert [each["id"] for tag, each in tags if tag == "section"] == ["z", "a", "fig2", "fig10"]


def test_links_stay_inside_the_page_and_find_their_target(page):
    assert len(page.identifiers) == len(set(page.identifiers))
    targets = [link for link in page.links if link != "data:,"]
    assert len(targets) > 10
    assert all(link.startswith("#") and link[1:] in page.identifiers for link in targets)


def test_headings_do_not_skip_a_level_and_figures_have_words(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    plots = [each for _, each in page.tags if each.get("class") == "plot"]
    assert len(plots) == 6
    assert all(each["role"] == "img" for each in plots)
    assert all(each["aria-label"].startswith(("Chart: ", "Image: ")) for each in plots)


def test_text_of_a_record_cannot_become_markup(path):
    html = path.read_text("utf-8")
    assert "Second </script>" not in html
    assert "<b>& more" not in html


def test_same_records_give_the_same_bytes_and_no_other_file(path, tmp_path):
    again = build(write_records(tmp_path / "results"), tmp_path / "report.html", KNOWN)
    assert again.read_bytes() == path.read_bytes()
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
    before = again.read_bytes()
    assert build(tmp_path / "results", again, KNOWN).read_bytes() == before


def test_failure_leaves_the_old_page_alone(tmp_path):
    output = tmp_path / "report.html"
    output.write_text("old")
    results = write_records(tmp_path / "results")
    (results / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not JSON"):
        build(results, output)
    assert output.read_text() == "old"
    (results / "broken.json").unlink()
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        build(results, tmp_path / "folder")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "report.html", "results"]


def test_empty_folder_gives_a_page_and_a_missing_one_an_error(tmp_path):
    html = build(write_records(tmp_path / "results", []), tmp_path / "r.html").read_text("utf-8")
    assert "No claim has been measured yet" in Page(html).text
    with pytest.raises(ValueError, match="nowhere is not a folder of records"):
        build(tmp_path / "nowhere", tmp_path / "r.html")


DELETE = object()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["title"], DELETE, r"title is missing"),
        (["runs"], {}, r"runs must be a list, got \{\}"),
        (["name"], "a b", r"name must be letters"),
        (["runs", 1, "seed"], DELETE, r"runs\[1\]\.seed is missing"),
        (["runs", 1, "seed"], True, r"runs\[1\]\.seed must be a whole number, got true"),
        (["runs", 1, "seed"], 0, r"runs\[1\]\.seed is 0 for the second time"),
        (["runs", 1, "metrics"], [1], r"runs\[1\]\.metrics must be an object"),
        (
            ["runs", 2, "metrics", "layer_elbo"],
            "good",
            r"runs\[2\]\.metrics\.layer_elbo must be a number",
        ),
        (["claims", 0, "value"], "99", r'claims\[0\]\.value must be a number, got "99"'),
        (["claims", 0, "value"], math.nan, r"claims\[0\]\.value must be finite"),
        (["claims", 0, "tolerance"], -1, r"claims\[0\]\.tolerance must be at least 0"),
        (["claims", 0, "direction"], "up", r'direction must be one of at least.*, got "up"'),
        (["claims", 0, "metric"], "typo", r"claims\[0\]\.metric names 'typo', which no run"),
        (["figures", 0, "traces", 0, "kind"], "pie", r"traces\[0\]\.kind must be one of"),
        (["figures", 0, "traces", 0, "y"], [1], r"traces\[0\]\.y has 1 numbers, but x has 200"),
        (["figures", 0, "traces", 0, "error"], [1], r"error has 1 numbers, but y has 200"),
        (["figures", 0, "traces", 0, "x", 3], [], r"traces\[0\]\.x\[3\] must be a number or"),
        (["figures", 0, "x_log"], "yes", r"figures\[0\]\.x_log must be true or false"),
    ],
)
def test_bad_record_names_the_file_and_the_key(tmp_path, place, value, message):
    record = copy.deepcopy(made_up_records()[1])
    *parents, last = place
    target = record
    for key in parents:
        target = target[key]
    if value is DELETE:
        del target[last]
    else:
        target[last] = value
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"bad\.json: .*" + message):
        read_record(path)


def test_two_records_of_one_name_are_refused(tmp_path):
    write_records(tmp_path)
    (tmp_path / "copy.json").write_bytes((tmp_path / "fig2.json").read_bytes())
    with pytest.raises(ValueError, match=r"fig2\.json: name 'fig2' is that of another record"):
        build(tmp_path, tmp_path / "report.html")


def test_configuration_without_the_metric_is_not_measured(tmp_path):
    record = made_up_records()[1]
    for run in record["runs"][:5]:
        del run["metrics"]["layer_elbo"]
    output = build(write_records(tmp_path / "results", [record]), tmp_path / "report.html")
    assert "○ not measured 1" in Page(output.read_text("utf-8")).text


def test_epochs_are_those_of_each_network_where_they_differ(tmp_path):
    def text(record, folder):
        output = build(write_records(tmp_path / folder, [record]), tmp_path / f"{folder}.html")
        return Page(output.read_text("utf-8")).text

    record = made_up_records()[1]
    assert "200 epochs" in text(record, "one")
    for run in record["runs"]:
        run["metrics"] |= {"layer.epochs": 200, "zero.epochs": 200, "neuron.epochs": 60}
    assert "epochs: layer, zero 200; neuron 60" in text(record, "several")


def figure(trace, **changes):
    record = made_up_records()[0]
    record["figures"] = [record["figures"][0] | {"traces": [trace]} | changes]
    return record


def read_figure(tmp_path, trace, **changes):
    return read_record(
        next(write_records(tmp_path, [figure(trace, **changes)]).glob("*.json"))
    ).figures[0]


def test_long_lines_have_bands_unless_a_log_axis_cannot_show_them(tmp_path):
    xs = list(range(1, 40))
    trace = curve("a", lambda x: x, xs, error=lambda x: 2.0)
    band, line = plot(read_figure(tmp_path, trace))["data"]
    assert band["fill"] == "toself"
    assert band["y"][0] == 3
    assert band["y"][-1] == -1
    assert "error_y" not in line
    (line,) = plot(read_figure(tmp_path, trace, y_log=True))["data"]
    assert line["error_y"]["array"] == [2.0] * 39


def test_histogram_takes_values_or_counted_bins(tmp_path):
    values = {"name": "a", "kind": "histogram", "x": [1.0, 2.0, 2.0]}
    assert plot(read_figure(tmp_path, values))["data"][0]["type"] == "histogram"
    (bins,) = plot(read_figure(tmp_path, values | {"x": [0.0, 0.5, 1.0], "y": [3, 4, 1]}))["data"]
    assert bins["type"] == "bar"
    assert bins["width"] == 0.5


def test_image_has_square_pixels_around_zero_and_no_table(tmp_path):
    drawn = read_figure(tmp_path, {"name": "a", "kind": "image", "rows": [[0, 1], [-1, None]]})
    image = plot(drawn)
    assert image["data"][0]["z"] == [[0, 1], [-1, None]]
    assert image["data"][0]["zmid"] == 0
    assert image["layout"]["yaxis"]["scaleanchor"] == "x"
    assert describe(drawn).startswith("Image: ")
    with pytest.raises(ValueError, match="rows of different lengths"):
        read_figure(tmp_path, {"name": "a", "kind": "image", "rows": [[0, 1], [1]]})


def test_description_says_what_is_drawn(tmp_path):
    drawn = read_figure(tmp_path, curve("ν", lambda x: 2.0 * x, [1, 2, 3]), y_log=True)
    assert describe(drawn) == (
        "Chart: KL, nats a weight against α, logarithmic in x and y. ν: line, 3 values from 2 to 6."
    )


def test_gaps_are_null_since_json_has_no_nan(tmp_path):
    drawn = read_figure(tmp_path, {"name": "a", "kind": "line", "x": [1, 2], "y": [math.nan, 1]})
    assert plot(drawn)["data"][0]["y"] == [None, 1]


def test_missing_dependency_names_the_extra(processes, tmp_path):
    script = (
        "import sys; sys.modules['plotly'] = None\n"
        "from pathlib import Path; from zeromean.experiments.report import build\n"
        f"build(Path({str(tmp_path)!r}), Path({str(tmp_path / 'r.html')!r}))"
    )
    finished = processes.run([sys.executable, "-c", script], code=1)
    assert "pip install '.[experiments]'" in finished.stderr


DRAWN = """
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  await pause(500);
  return {
    drawn: document.documentElement.dataset.drawn,
    figures: count(".plot:has(.main-svg :is(.trace, .hm)):has(.xtitle):has(.ytitle)"),
    rows: count(".data tbody tr"),
    background: colour("body", "backgroundColor"),
    ticks: document.querySelector(".plot .xtick text").style.fill,
  };
"""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_every_figure_without_a_complaint(path, tmp_path, width, scheme):
    page = shutil.copy(path, tmp_path / "page.html")
    answer = ask(page, DRAWN, width=width, scheme=scheme, profile=tmp_path / "profile")
    points = sum(
        len(trace.get("x", ()))
        for record in made_up_records()
        for drawn in record["figures"]
        for trace in drawn["traces"]
    )
    assert answer == {
        "problems": [],
        "width": width,
        "overflow": 0,
        "drawn": "6",
        "figures": 6,
        "rows": points,
        "background": {"dark": "rgb(22, 24, 28)", "light": "rgb(253, 252, 250)"}[scheme],
        "ticks": {"dark": "rgb(162, 166, 174)", "light": "rgb(91, 96, 104)"}[scheme],
    }


def test_markdown_has_pictures_of_every_kind_of_figure(tmp_path):
    build_markdown(write_records(tmp_path / "records"), tmp_path / "docs" / "results.md")
    text = (tmp_path / "docs" / "results.md").read_text("utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert pictures
    for picture in pictures:
        pixels = image.imread(tmp_path / "docs" / picture)
        assert pixels.shape[0] > 200
        assert pixels[..., :3].std() > 0.02  # Something is drawn.


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (["runs", 0, "metrics", "layer_elbo"], 10**400),
        (["runs", 0, "metrics", "other"], -(10**400)),
        (["runs", 0, "seconds"], 10**400),
        (["runs", 0, "seed"], 10**400),
        (["runs", 0, "metrics", "layer_elbo"], "text"),
        (["claims", 0, "paper"], 10**400),
        (["figures", 0, "traces", 0, "y", 3], 10**400),
        (["figures", 0, "traces", 0, "x", 3], 10**400),
        (["runs", 0, "seconds"], 1e308),
        (["runs", 0, "metrics", "net.epochs"], "many"),
        (["runs", 0, "environment", "python"], "\ud800"),
        (["runs", 0, "config", "epochs"], {"a": None}),
    ],
)
def test_damaged_record_is_named_and_the_others_are_shown(tmp_path, place, value):
    damaged, sound = copy.deepcopy(made_up_records()[1]), made_up_records()[0]
    *parents, last = place
    target = damaged
    for key in parents:
        target = target[key]
    target[last] = value
    folder = write_records(tmp_path / "results", [sound, damaged])
    (folder / "empty.json").write_text("")
    sentences = []
    page = build(folder, tmp_path / "page.html", on_damage=sentences.append).read_text("utf-8")
    assert sound["title"] in Page(page).text
    assert str(folder / "empty.json") in sentences[0]
    for sentence in sentences[1:]:
        assert str(folder / f"{damaged['name']}.json") in sentence
        assert len(sentence) < 400
    shown = damaged["title"] in Page(page).text
    assert shown == (len(sentences) == 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [(True, "yes"), (False, "no"), (None, "none"), ([True, False], "yes, no"), ([1, 2], "[1, 2]")],
)
def test_settings_are_shown_in_words(value, words):
    assert format_setting(value) == words


@pytest.mark.parametrize(
    ("values", "words"),
    [([True], "yes"), ([False, False], "no"), ([True, False, True], "yes for 2 of 3 seeds")],
)
def test_flags_of_seeds_are_shown_in_words(values, words):
    assert format_flags(values) == words
