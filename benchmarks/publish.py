"""Puts the committed records into README.md and the documentation, between their markers.

python benchmarks/publish.py            writes
python benchmarks/publish.py --check    says whether they are up to date
"""

import json
import re
import sys
from functools import partial
from itertools import groupby
from pathlib import Path

import lstm_tables

from zeromean.experiments.report.page import section
from zeromean.experiments.report.records import read_record

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "results"
MARKERS = r"(<!-- {0}:begin -->\n).*?(<!-- {0}:end -->)"
# What the README shows; docs/speed.md has everything, with the bounds that we set ourselves.
MAIN_GROUPS = (
    "Training step, LeNet-5-Caffe, batch 128, in deterministic steps",
    "20 samples, one stochastic layer, LeNet-5-Caffe, batch 128, in single passes",
    "20 samples, LeNet-5-Caffe, batch 128, in 20 deterministic passes",
)
# Experiment, metric, and how the README calls it.
HEADLINES = (
    ("table1", "zero-mean.accuracy_mean", "variance network, its means alone"),
    ("table1", "zero-mean.accuracy_averaged", "variance network, 20 samples"),
    ("table1", "zero-mean.elbo", "ELBO of the variance network, nat"),
    ("table1", "additive.elbo", "ELBO with means and variances, nat"),
    ("fig5", "lost_at_98", "98% of its variances pruned, accuracy lost"),
    ("sparse_lenet300", "sparse.compression", "sparse LeNet-300-100, compression"),
    ("sparse_lenet300", "sparse.error", "its test error"),
    ("sparse_lenet5", "sparse.compression", "sparse LeNet-5-Caffe, compression"),
    ("sparse_lenet5", "sparse.error", "its test error"),
    (
        "linear_synthetic",
        "regression.vd, noise given.error",
        "VD regression, 10 of 1,000 features relevant, noise precision given: error",
    ),
    (
        "linear_synthetic",
        "regression.classical rvm, noise given.error",
        "classical RVM regression on the same data: error",
    ),
)
FIRST_FIT = "variational dropout, first fit of a process"
STREAM_COLUMNS = {
    "rows": "{:,}",
    "seconds": "{:.2f}",
    "microseconds_a_row": "{:.2f}",
    "peak_mebibytes": "{:.0f}",
}


def main() -> int:
    parts = [
        ("README.md", "results", results),
        ("README.md", "speed", partial(tables, groups=MAIN_GROUPS)),
        ("docs/speed.md", "speed", partial(tables, groups=None)),
        ("docs/speed.md", "training", training),
        ("docs/linear_models.md", "speed", linear_models),
        ("docs/linear_models.md", "wide", wide_linear_models),
        ("docs/linear_models.md", "coverage", coverage),
        ("docs/linear_models.md", "overconfidence", overconfidence),
        ("docs/compression.md", "report", compression_report),
        ("docs/compression.md", "speed", compression),
        ("docs/recurrent.md", "sparse", lstm_tables.sparse),
        ("docs/recurrent.md", "compressed", lstm_tables.compressed),
        ("docs/recurrent.md", "bits", lstm_tables.bits),
        ("docs/samplers.md", "accuracy", samplers),
        ("docs/tutorials/train.md", "collapse", collapse),
        ("docs/moments.md", "cost", cost_of_moments),
        ("docs/moments.md", "errors", errors_of_moments),
    ]
    stale = []
    for name, marker, write in parts:
        path = PROJECT / name
        text = path.read_text()
        between = re.compile(MARKERS.format(marker), re.DOTALL)
        wanted = between.sub(lambda m, write=write: m[1] + write() + m[2], text)
        if wanted != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(wanted)
    if stale:
        print("out of date:" if "--check" in sys.argv else "wrote", ", ".join(stale))
    return int(bool(stale) and "--check" in sys.argv)


def results() -> str:
    """What we show first, from the records of the experiments: claims of documents alone."""
    lines = [["", "document", "measured", "seeds", "verdict", "command"]]
    marks: list[str] = []
    for name, metric, label in HEADLINES:
        record = read_record(RESULTS / "experiments" / f"{name}.json")
        part = section(name, "", record)
        row = next(row for row in part.document_rows if row.metric == metric)
        note = "; ".join(part.marks)
        if note and note not in marks:
            marks.append(note)
        star = f" {marks.index(note) + 1})" if note else ""
        command = f"`{record.command}`"
        claimed = row.claimed.lstrip("≥≤ ")
        lines.append([label, claimed, row.ours, f"{row.count}", row.verdict + star, command])
    notes = [f"{number}) {note}." for number, note in enumerate(marks, 1)]
    rule = (
        "Measured: the mean over seeds with its 95% interval, or the values of fewer than three "
        "seeds."
    )
    return _table(lines) + "\n\n" + " ".join([rule, *notes]) + "\n"


def tables(groups: tuple[str, ...] | None) -> str:
    record = _record("benchmarks")
    parts = [
        f"torch {record['torch']}, float32, {_circumstances(record)}. "
        "Median [inter-quartile range]; gaps under 7% are ties.\n"
    ]
    for group, rows in groupby(record["rows"], key=lambda row: row["group"]):
        if groups is None or group in groups:
            parts.append(f"**{group}**\n\n{_comparison(list(rows), with_bounds=groups is None)}\n")
    return "\n".join(parts)


def training() -> str:
    """What `fit` costs, and what a second process brings."""
    if not (RESULTS / "training.json").exists():
        return "Not measured yet.\n"
    record = _record("training")
    processes, overhead, memory = (record[key] for key in ("processes", "overhead", "memory"))
    rates = f"{processes['one']:,} and {processes['two']:,} images a second"
    span = f"[{overhead['lower']:.1%}, {overhead['upper']:.1%}]"
    sizes = f"{memory['first']:.0f} and {memory['last']:.0f} MiB"
    lines = [
        ["", "measured", "must reach"],
        [
            f"two processes next to one of one thread ({rates})",
            f"{processes['times']:.2f} times faster",
            f"{processes['must']:g}",
        ],
        ["`fit` next to a bare loop", f"{overhead['more']:.1%} {span} more", "5%"],
        [
            f"memory after a quarter and all of {memory['steps']:,} steps ({sizes})",
            f"{memory['last'] - memory['first']:.1f} MiB more",
            f"{memory['must']:g}",
        ],
    ]
    note = "LeNet-5, batches of 512 in all, wall time; the memory is that of a small network."
    return f"{record['cpu']}, {record['date']}. {note}\n\n{_table(lines)}\n"


def linear_models() -> str:
    record = _record("linear_models")
    fits = [["rows × features", "ours", "peer", "times faster", "must reach"]]
    fits += [
        [
            row["size"],
            row["ours"],
            row["peer"],
            _with_quartiles(row, "median", 1),
            _bound(row["must"]),
        ]
        for row in record["rows"]
    ]
    fits += [
        [first["size"], FIRST_FIT, "ARDRegression", f"{first['ratio']:.1f}", "5"]
        for first in record["first_fits"]
    ]
    cores = record["all_cores"]
    wall = f"variational dropout, wall time on {cores['cores']} cores"
    fits.append([cores["size"], wall, "ARDRegression", f"{cores['ratio']:.1f}", ""])
    streams = [["rows streamed, × 100", "seconds", "µs a row", "peak memory, MiB"]]
    streams += [
        [form.format(stream[key]) for key, form in STREAM_COLUMNS.items()]
        for stream in record["streams"]
    ]
    note = f"{_circumstances(record)}. CPU time; median [inter-quartile range].\n"
    return "\n".join([note, _table(fits), "", _table(streams), ""])


def wide_linear_models() -> str:
    """What fits take, and find, where features are more than rows."""
    record = _record("wide_linear_models")
    load = f"{record['load']:.0f} processes waiting for {record['cores']} cores"
    count = len(record["seeds"])
    data = "one data set of each kind" if count == 1 else f"medians over {count} data sets"
    note = f"{_circumstances(record)}. CPU time, on a loaded machine ({load}); {data}."
    return "\n".join([note, "", *(_wide_group(record[name]) for name in ("text", "wide"))])


def _wide_group(group: dict) -> str:
    peer = group["rows"][-1]["model"]
    lines = [
        [
            f"{group['size']}",
            "seconds",
            f"times faster than {peer}",
            "accuracy or R²",
            "features",
            f"of the {group['num_relevant']} relevant",
        ]
    ]
    lines += [
        [
            row["model"] if row["model"] == peer else f"`{row['model']}`",
            f"{row['seconds']:.2f}",
            f"{row['times_faster']:.2g}",
            f"{row['score']:.3f}",
            f"{row['features']:.0f}",
            f"{row['relevant_features']:.0f}",
        ]
        for row in group["rows"]
    ]
    return _table(lines) + "\n"


def coverage() -> str:
    """What intervals cover where rows are few."""
    record = _record("linear_uncertainty")
    names = ("RVMRegressor", "VariationalDropoutRegressor")
    data = list(dict.fromkeys(row["data"] for row in record["coverage"]))
    lines = [
        ["rows × features, relevant", *(f"`{name}`, {what}" for what in data for name in names)]
    ]
    sizes = dict.fromkeys((r["rows"], r["features"], r["relevant"]) for r in record["coverage"])
    for rows, features, relevant in sizes:
        cells = [
            f"{100 * row[name]:.0f}%"
            for row in record["coverage"]
            if (row["rows"], row["features"], row["relevant"]) == (rows, features, relevant)
            for name in names
        ]
        lines.append([f"{rows} × {features}, {relevant}", *cells])
    return _table(lines) + "\n"


def overconfidence() -> str:
    """Probabilities of classifiers where features exceed rows."""
    record = _record("linear_uncertainty")
    found, count = record["classification"], record["settings"]["class_sets"]
    rows, features, relevant = found["size"]
    lines = [["", "accuracy", "nats a new row"]]
    for name in ("VariationalDropoutClassifier", "RVMClassifier"):
        row = found[name]
        lines.append([f"`{name}`", f"{100 * row['accuracy']:.0f}%", f"{row['nll']:.2f}"])
    return (
        f"{count} data sets of {rows} rows and {features} features, {relevant} of them relevant; "
        f"`RVMClassifier` had the better likelihood in {found['rvm_is_better']}.\n\n"
        + _table(lines)
        + "\n"
    )


def samplers() -> str:
    """Each sampler's accuracy and nats, for networks that were trained with `local`."""
    record = _record("samplers")
    networks = list(dict.fromkeys(row["network"] for row in record["rows"]))
    lines = [["predicted with", *(f"{n}: {what}" for n in networks for what in ("%", "nll"))]]
    for sampler in dict.fromkeys(row["sampler"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["sampler"] == sampler]
        cells = [f(row) for row in rows for f in (_accuracy, _nll)]
        lines.append([f"`{sampler}`", *cells])
    return _table(lines) + "\n"


def cost_of_moments() -> str:
    """KL to many samples and CPU time, of moments and of samples."""
    if not (RESULTS / "moments.json").exists():
        return "Not measured yet.\n"
    record = _record("moments")
    lines = [["network", "prediction", "KL, nats", "largest change", "passes"]]
    for name, found in record["networks"].items():
        for row in found["rows"]:
            change, passes = f"{row['largest_change']:.3f}", f"{row['passes']:.2f}"
            lines.append([name, row["way"], f"{row['kl']:.2g}", change, passes])
    settings = next(iter(record["networks"].values()))["settings"]
    said = (
        f"{_circumstances(record)}, batch 128. Trained on {settings['images']:,} images of MNIST "
        f"for one pass. The KL is the mean over {settings['tested']} test images, to "
        f"{settings['samples']:,} samples, whose own noise is in it too; “largest change” is of a "
        "probability; a pass is one of the deterministic network."
    )
    return f"{said}\n\n{_table(lines)}\n"


def errors_of_moments() -> str:
    """How far means and standard deviations of logits are from those of samples."""
    if not (RESULTS / "moments.json").exists():
        return "Not measured yet.\n"
    record = _record("moments")
    titles = ["network", "largest error of a mean, in std", "by the noise of samples alone"]
    lines = [[*titles, "error of the std"]]
    for name, found in record["networks"].items():
        error = found["error"]
        numbers = [f"{error['mean']:.2f}", f"{error['noise']:.2f}", f"{error['std']:.1%}"]
        lines.append([name, *numbers])
    return _table(lines) + "\n"


def collapse() -> str:
    """How many of the small problems end as a constant."""
    record = _record("collapse")
    columns = list(dict.fromkeys(row["warmup"] for row in record["rows"]))
    lines = [["posterior, prior", "initial noise", *columns]]
    found = {(r["network"], r["start"], r["warmup"]): r["collapsed"] for r in record["rows"]}
    for network, start in dict.fromkeys((r["network"], r["start"]) for r in record["rows"]):
        counts = [str(found.get((network, start, column), "")) for column in columns]
        lines.append([network, f"`{start}`", *counts])
    return _table(lines) + "\n"


def _accuracy(row: dict) -> str:
    return f"{row['accuracy']:.1f}"


def _nll(row: dict) -> str:
    return f"{row['nll']:.3f}"


def compression() -> str:
    record = _record("compression")
    lines = [["network", "", "times", "must reach", "aim"]]
    lines += [
        [row["network"], row["what"], _with_quartiles(row, "factor", 1), *map(_bound, _goals(row))]
        for row in record["rows"]
    ]
    note = f"{_circumstances(record)}. CPU time; median [inter-quartile range].\n"
    return "\n".join([note, _table(lines), ""])


def compression_report() -> str:
    return f"```\n{_record('compression')['reports']['lenet_300_100']}\n```\n"


def _record(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _circumstances(record: dict) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    return f"{record['cpu']}, one thread, {record['date']}; {packages}"


def _comparison(rows: list[dict], *, with_bounds: bool) -> str:
    bounded = with_bounds and any(row["must_reach"] is not None for row in rows)
    lines = [["", rows[0]["unit"], *(["must reach", "aim"] if bounded else [])]]
    for row in rows:
        bounds = [_bound(row[key]) for key in ("must_reach", "aim")] if bounded else []
        lines.append([row["name"], _value(row), *bounds])
    return _table(lines)


def _value(row: dict) -> str:
    if "value" not in row:
        return row["verdict"]
    return _with_quartiles(row, "value", {"ratio": 2, "MiB": 1, "s": 3}[row["unit"]])


def _with_quartiles(row: dict, key: str, digits: int) -> str:
    text = f"{row[key]:,.{digits}f}"
    if row["lower"] != row["upper"]:
        text += f" [{row['lower']:,.{digits}f}, {row['upper']:,.{digits}f}]"
    return text


def _goals(row: dict) -> tuple[float | None, float | None]:
    return row["must"], row["aim"]


def _bound(bound: float | None) -> str:
    return "" if bound is None else f"{bound:g}"


def _table(lines: list[list[str]]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


if __name__ == "__main__":
    sys.exit(main())
