"""Puts the committed record into README.md and docs/speed.md, between their markers.

python benchmarks/publish.py            writes
python benchmarks/publish.py --check    says whether they are up to date
"""

import json
import re
import sys
from itertools import groupby
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
RECORD = PROJECT / "results" / "benchmarks.json"
MARKERS = re.compile(r"(<!-- speed:begin -->\n).*?(<!-- speed:end -->)", re.DOTALL)
# What the README shows; docs/speed.md has everything, with the bounds that we set ourselves.
MAIN_GROUPS = (
    "Training step, LeNet-5-Caffe, batch 128, in deterministic steps",
    "Memory kept for backward by a forward pass, LeNet-5-Caffe, batch 128, MiB",
    "20 samples, one stochastic layer, LeNet-5-Caffe, batch 128, in single passes",
    "20 samples, LeNet-5-Caffe, batch 128, in 20 deterministic passes",
    "20 samples, LeNet-5-Caffe, batch 1, in 20 deterministic passes",
)


def main() -> int:
    record = json.loads(RECORD.read_text())
    stale = []
    for path, groups in ((PROJECT / "README.md", MAIN_GROUPS), (PROJECT / "docs/speed.md", None)):
        text = path.read_text()
        wanted = MARKERS.sub(lambda m, g=groups: m[1] + tables(record, g) + m[2], text)
        if wanted != text:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(wanted)
    if stale:
        print("out of date:" if "--check" in sys.argv else "wrote", ", ".join(stale))
    return int(bool(stale) and "--check" in sys.argv)


def tables(record: dict, groups: tuple[str, ...] | None) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in record["packages"].items())
    parts = [
        f"torch {record['torch']}, {record['cpu']}, one thread, float32, {record['date']}; "
        f"{packages}. Median [inter-quartile range]; gaps under 7% are ties.\n"
    ]
    for group, rows in groupby(record["rows"], key=lambda row: row["group"]):
        if groups is None or group in groups:
            parts.append(f"**{group}**\n\n{_table(list(rows), with_bounds=groups is None)}\n")
    return "\n".join(parts)


def _table(rows: list[dict], *, with_bounds: bool) -> str:
    bounded = with_bounds and any(row["must_reach"] is not None for row in rows)
    head = ["", rows[0]["unit"], *(["must reach", "aim"] if bounded else [])]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row["name"], _value(row)]
        if bounded:
            cells += ["" if row[k] is None else f"{row[k]:g}" for k in ("must_reach", "aim")]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _value(row: dict) -> str:
    if "value" not in row:
        return row["verdict"]
    digits = {"ratio": 2, "MiB": 1, "s": 3}[row["unit"]]
    text = f"{row['value']:.{digits}f}"
    if row["lower"] != row["upper"]:
        text += f" [{row['lower']:.{digits}f}, {row['upper']:.{digits}f}]"
    return text


if __name__ == "__main__":
    sys.exit(main())
