"""The notes of a record, with the numbers that were measured in the place of their names.

{neuron.elbo}          the mean of a metric over the seeds that are shown
{neuron.elbo:.1f}      the same, written as Python's format says
{setting epochs}       a setting of their configuration
{claim neuron.elbo}    what the first claim about a metric says
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from zeromean.experiments.report.formats import format_number
from zeromean.experiments.report.records import RecordedClaim, Run
from zeromean.experiments.report.verdicts import summarize

PLACEHOLDER = re.compile(r"\{(?:(setting|claim) )?([^{}:]+)(?::([^{}]*))?\}")
UNKNOWN = "(not measured)"


def fill(text: str, runs: Sequence[Run], claims: Sequence[RecordedClaim]) -> str:
    """A text with numbers for its placeholders, those of `runs`."""

    def number(match: re.Match[str]) -> str:
        kind, name, form = match.groups()
        value = _value(kind, name, runs, claims)
        if isinstance(value, list | tuple):
            return ", ".join(_written(each, form) for each in value)
        return _written(value, form)

    return PLACEHOLDER.sub(number, text)


def _value(
    kind: str | None, name: str, runs: Sequence[Run], claims: Sequence[RecordedClaim]
) -> Any:
    if kind == "claim":
        return next((claim.value for claim in claims if claim.metric == name), None)
    if kind == "setting":
        settings: Mapping[str, Any] = runs[0].config if runs else {}
        return settings.get(name)
    values = [run.metrics[name] for run in runs if isinstance(run.metrics.get(name), int | float)]
    found = summarize(values)
    return found.mean if found else None


def _written(value: Any, form: str | None) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool | str):
        return str(value)
    return format(value, form).replace("-", "−") if form else format_number(value)
