"""Numbers as a reader wants them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from zeromean.experiments.report.verdicts import Measured, Summary

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_THIN_SPACE = "\u202f"  # and no line break in it


def format_number(number: float, digits: int = 4) -> str:
    """A number with so many significant digits at most, −1.2×10⁻⁵ where it is tiny or huge."""
    if math.isnan(number):
        return "not a number"
    if math.isinf(number):
        return "∞" if number > 0 else "−∞"
    if number != 0 and not 1e-3 <= abs(number) < 1e6:
        mantissa, exponent = f"{number:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}×10{str(int(exponent)).translate(_SUPERSCRIPTS)}".replace("-", "−")
    decimals = max(0, digits - 1 - _magnitude(number))
    text = f"{number:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", "−")


def format_summary(summary: Summary | None) -> str:
    """99.38 ± 0.02, to two digits of the standard error."""
    if summary is None:
        return "—"
    mean, stderr = summary.mean, summary.stderr
    if stderr is None:
        return format_number(mean, 5)
    decimals = 1 - _magnitude(stderr)
    # Where the error is far below the mean, or either is tiny, digits cannot be aligned.
    if stderr == 0 or decimals > 6 or not abs(mean) < 1e6 or stderr < 1e-6 * abs(mean):
        return f"{format_number(mean, 5)} ± {format_number(stderr, 2)}"
    decimals = max(0, decimals)
    return f"{mean:.{decimals}f} ± {stderr:.{decimals}f}".replace("-", "−")


def format_measured(ours: Measured | None) -> str:
    """99.38 [99.33, 99.43], to two digits of the interval; the values of fewer seeds one by one."""
    if ours is None:
        return "—"
    if ours.interval is None:
        return "; ".join(format_number(value, 5) for value in ours.values) or "—"
    low, high = ours.interval
    half = (high - low) / 2
    if half == 0:
        return format_number(low if ours.centre is None else ours.centre, 5)
    decimals = 1 - _magnitude(half)
    if decimals > 6 or not max(abs(low), abs(high)) < 1e6 or half < 1e-6 * abs(low + high):
        centre, *ends = (format_number(x, 5) for x in (ours.centre or 0.0, low, high))
    else:
        decimals = max(0, decimals)
        centre, *ends = (_fixed(x, decimals) for x in (ours.centre or 0.0, low, high))
    interval = f"[{', '.join(ends)}]"
    return interval if ours.centre is None else f"{centre} {interval}"


def with_unit(text: str, unit: str) -> str:
    """A number and its unit: 99.4 %, 280×."""
    return text + unit if unit in ("", "×", "°") else f"{text}{_THIN_SPACE}{unit}"


def format_seconds(seconds: float) -> str:
    """3.2 s, 4 min 10 s, 2 h 05 min."""
    if seconds < 59.95:
        return f"{format_number(seconds, 2)} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_seeds(seeds: list[int]) -> str:
    """0–4, 7."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][-1] + 1:
            spans[-1].append(seed)
        else:
            spans.append([seed])
    return ", ".join(
        f"{span[0]}–{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)) for span in spans
    )


def in_words(seeds: list[int]) -> str:
    """seed 3, seeds 0–4."""
    return f"seed{'s' if len(seeds) > 1 else ''} {format_seeds(seeds)}"


def format_setting(value: Any) -> str:
    """A value of a configuration: text as it is, yes and no, everything else as JSON."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, list) and any(isinstance(each, bool) for each in value):
        return ", ".join(map(format_setting, value))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def format_flags(values: Sequence[bool]) -> str:
    """Yes or no, where all seeds say the same; else how many say yes."""
    if len(set(values)) == 1:
        return format_setting(values[0])
    return f"yes for {sum(values)} of {len(values)} seeds"


def _fixed(number: float, decimals: int) -> str:
    text = f"{number:.{decimals}f}"
    # −0.00 is 0.00.
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")


def _magnitude(number: float) -> int:
    return math.floor(math.log10(abs(number))) if number else 0
