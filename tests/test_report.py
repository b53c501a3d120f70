"""The report: its verdicts, its page, its refusals, and how a browser draws it."""

import copy
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib import image

from zeromean.report import build, build_markdown
from zeromean.report.figures import describe, plot
from zeromean.report.formats import (
    format_number,
    format_seconds,
    format_seeds,
    format_summary,
    with_unit,
)
from zeromean.report.records import Claim, read_record
from zeromean.report.verdicts import Summary, judge, summarize

pytest.importorskip("jinja2")
pytest.importorskip("plotly")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
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
                "paper": 0,
                "tolerance": 0.001,
                "direction": "equal",
                "unit": "nat",
                "source": "Fig. 2",
            },
            {
                "metric": "approximation_gap",
                "label": "Largest error of the fitted approximation",
                "paper": 0.009,
                "tolerance": 0,
                "direction": "at most",
                "unit": "nat",
                "source": "Molchanov et al. 2017, §4.2",
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
        "notes": "The exact curve is computed with Dawson’s function.\n\nν < 1 has no mean.",
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
        }

    def claim(metric, label, paper, tolerance, direction, unit="%"):
        return {
            "metric": metric,
            "label": label,
            "paper": paper,
            "tolerance": tolerance,
            "direction": direction,
            "unit": unit,
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


def a_claim(direction="at least", paper=99.4, tolerance=0.15) -> Claim:
    return Claim(
        metric="m",
        label="l",
        paper=paper,
        tolerance=tolerance,
        direction=direction,
        unit="",
        source="",
    )


@pytest.mark.parametrize(
    ("direction", "mean", "stderr", "expected"),
    [
        ("at least", 99.25, None, "confirmed"),  # on the bound, which binary numbers miss
        ("at least", 99.9, None, "confirmed"),
        ("at least", 99.2, None, "not confirmed"),  # one seed cannot say more
        ("at least", 99.2, 0.04, "not confirmed"),  # within two standard errors of the bound
        ("at least", 99.2, 0.02, "different direction"),
        ("at most", 99.55, 0.0, "confirmed"),
        ("at most", 99.6, 0.02, "different direction"),
        ("equal", 99.55, 0.01, "confirmed"),
        ("equal", 99.9, 0.01, "not confirmed"),
        ("equal", math.nan, None, "not confirmed"),
        ("at least", -math.inf, None, "not confirmed"),
    ],
)
def test_verdict_follows_the_stated_rule(direction, mean, stderr, expected):
    assert judge(a_claim(direction), Summary(mean, stderr, 3)) == expected


def test_nothing_measured_is_no_verdict():
    assert summarize([]) is None
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
    assert with_unit("280", "×") == "280×"
    assert with_unit("99", "%") == "99\u202f%"
    assert [format_seconds(s) for s in (3.21, 250, 7512)] == ["3.2 s", "4 min 10 s", "2 h 05 min"]
    assert format_seeds([7, 0, 1, 2, 4, 5]) == "0–2, 4, 5, 7"


def test_page_counts_the_claims_it_confirms(page):
    assert "3 of 7 measured claims confirmed" in page.text
    assert "✗ not confirmed 2" in page.text
    assert "⇄ different direction 2" in page.text
    assert "3 experiments not run, 1 claim" in page.text


def test_claims_stand_beside_our_numbers_with_seeds_and_command(page):
    command = "zeromean run table1 --epochs 200 --seeds 0 1 2 3 4 --jobs 2 --data-dir data"
    assert command in page.text
    assert "Seeds 0–4 · 200 epochs · 5 h 58 min, 1 h 11 min each" in page.text
    row = page.text[page.text.index("Averaged accuracy, zero-mean Table 1") :]
    assert re.match(r".* ≥ 99\.4 % 99\.\d+ ± 0\.0\d+ % n = 5 ✓ confirmed ≥ 99\.25 %", row[:140])


def test_configurations_are_not_averaged_together(page):
    assert "Also run: configuration 2 epochs = 5" in page.text
    assert page.text.count("n = 5") == 5
    assert page.text.count("n = 1") == 2 + 5


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
        (["claims", 0, "paper"], "99", r'claims\[0\]\.paper must be a number, got "99"'),
        (["claims", 0, "paper"], math.nan, r"claims\[0\]\.paper must be finite"),
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


def test_missing_dependency_names_the_extra(tmp_path):
    script = (
        "import sys; sys.modules['plotly'] = None\n"
        "from pathlib import Path; from zeromean.report import build\n"
        f"build(Path({str(tmp_path)!r}), Path({str(tmp_path / 'r.html')!r}))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install 'zeromean[experiments]'" in run.stderr


# Chromium's windows are 500 pixels wide at least: a frame can be as narrow as a phone.
FRAME = """<!DOCTYPE html><html><style>:root { color-scheme: light dark } body { margin: 0 }
iframe { border: 0; width: WIDTHpx; height: 100vh; display: block }</style>
<iframe src="page.html"></iframe><script>
addEventListener("message", (e) => { document.documentElement.dataset.report = e.data; });
</script></html>"""

# Tells the frame around it what the browser drew, and what it did not like.
PROBE = """<script>
const problems = [];
addEventListener("error", (e) => problems.push(e.message));
addEventListener("unhandledrejection", (e) => problems.push(String(e.reason)));
addEventListener("securitypolicyviolation", (e) => problems.push(e.blockedURI));
for (const level of ["error", "warn"]) console[level] = (...all) => problems.push(all.join(" "));
addEventListener("load", () => setTimeout(() => {
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  setTimeout(() => {
    const count = (selector) => document.querySelectorAll(selector).length;
    const root = document.documentElement;
    parent.postMessage(JSON.stringify({
      problems,
      width: innerWidth,
      overflow: root.scrollWidth - root.clientWidth,
      drawn: root.dataset.drawn,
      figures: count(".plot:has(.main-svg :is(.trace, .hm)):has(.xtitle):has(.ytitle)"),
      rows: count(".data tbody tr"),
      background: getComputedStyle(document.body).backgroundColor,
      ticks: document.querySelector(".plot .xtick text").style.fill,
    }), "*");
  }, 500);
}, 2500));
</script>"""


def browse(page: Path, profile: Path, *options: str) -> str:
    command = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", f"--user-data-dir={profile}", "--virtual-time-budget=20000"),
        *("--hide-scrollbars", *options, page.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_every_figure_without_a_complaint(path, tmp_path, width, scheme):
    html = path.read_text("utf-8").replace("<style>", f"{PROBE}<style>", 1)
    (tmp_path / "page.html").write_text(html, "utf-8")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), "utf-8")
    dom = browse(
        tmp_path / "frame.html",
        tmp_path / "profile",
        "--dump-dom",
        "--window-size=1300,900",
        f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}",
    )
    points = sum(
        len(trace.get("x", ()))
        for record in made_up_records()
        for drawn in record["figures"]
        for trace in drawn["traces"]
    )
    assert json.loads(Page(dom).tags[0][1]["data-report"]) == {
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
