"""The tables of docs/recurrent.md, from the record of the experiment sparse_lstm."""

import statistics
from pathlib import Path

from zeromean.experiments.report.formats import format_number, in_words
from zeromean.experiments.report.page import section
from zeromean.experiments.report.records import Record, read_record

RECORD = Path(__file__).resolve().parent.parent / "results" / "experiments" / "sparse_lstm.json"
ACCURACIES = {
    "accuracy.dense": "`nn.LSTM`, accuracy in per cent",
    "accuracy.sparse": "sparse, by its means",
    "accuracy.sparse_averaged": "sparse, 20 samples",
}
LAYERS = ("lstm.weight_ih_l0", "lstm.weight_hh_l0", "head")
SPEEDS = {
    "compressed.batch_256": "times faster, 256 sequences",
    "compressed.batch_32": "times faster, 32 sequences",
    "compressed.batch_1": "times faster, one sequence",
}


def sparse() -> str:
    """What the sparse network loses and keeps."""
    record = read_record(RECORD)
    weights = round(record.runs[0].metrics["kept"] * record.runs[0].metrics["compression"])
    lines = [_over_seeds(record, key, label, ".1f") for key, label in ACCURACIES.items()]
    lines.append(_over_seeds(record, "kept", f"weights that are left, of {weights:,}", ",.0f"))
    lines += [
        _over_seeds(record, f"sparsity.{layer}", f"`{layer}`: weights that are gone, %", ".1f")
        for layer in LAYERS
    ]
    rows = {row.metric: row for row in section(record.name, "", record).rows}
    lost = rows["accuracy_lost"]
    verdict = (
        f"Accuracy lost: {lost.ours}, and our bound is {lost.rule}: {lost.verdict}. "
        f"Weights over weights left: {rows['compression'].ours}.\n"
    )
    return _table([_head(record), *lines]) + "\n\n" + verdict


def compressed() -> str:
    """What the network without its dead units gains."""
    record = read_record(RECORD)
    first = record.runs[0].metrics
    size = round(first["compressed.file_bytes"] * first["compressed.file"])
    units = f"hidden units, of {record.runs[0].config['hidden_size']}"
    lines = [
        _over_seeds(record, "compressed.units", units, ".0f"),
        _over_seeds(record, "compressed.file_bytes", f"file, bytes (of {size:,})", ",.0f"),
        *(_over_seeds(record, key, label, ".1f") for key, label in SPEEDS.items()),
    ]
    return _table([_head(record), *lines]) + "\n"


def bits() -> str:
    """What rounding by the posterior costs, in the mean over the seeds."""
    record = read_record(RECORD)
    lines = [["`per`", "tolerance", "bits a weight that is left", "bytes", "test error (%)"]]
    keys = [key for key in record.runs[0].metrics if key.startswith("quantized.")]
    for variant in dict.fromkeys(key.rpartition(".")[0] for key in keys):
        _, per, tolerance = variant.split(".", 2)
        lines.append(
            [
                per,
                tolerance.removeprefix("tolerance "),
                f"{_mean(record, f'{variant}.bits'):.1f}",
                f"{_mean(record, f'{variant}.bytes'):,.0f}",
                f"{_mean(record, f'{variant}.error'):.1f}",
            ]
        )
    error = format_number(100 - _mean(record, "accuracy.sparse"), 2)
    seeds = in_words([run.seed for run in record.runs])
    note = f"Mean over {seeds}; before rounding the test error is {error}%.\n"
    return "\n".join([note, _table(lines), ""])


def _head(record: Record) -> list[str]:
    return [in_words([run.seed for run in record.runs]), "mean", "lowest", "highest"]


def _over_seeds(record: Record, key: str, label: str, form: str) -> list[str]:
    values = [run.metrics[key] for run in record.runs]
    return [label, *(format(f(values), form) for f in (statistics.fmean, min, max))]


def _mean(record: Record, key: str) -> float:
    return statistics.fmean(run.metrics[key] for run in record.runs)


def _table(lines: list[list[str]]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])
