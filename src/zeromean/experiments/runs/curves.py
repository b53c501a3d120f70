"""What figures are drawn from, kept with a run of a record: all of its metrics, lists included.

A record grows seed by seed, over sessions and machines, and the runs of earlier ones are gone by
then. Their numbers alone do not draw a figure of all seeds. The text is compressed: nobody reads it
line by line, and pictures of weights are long.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import Any

from zeromean.experiments.runs.json_files import to_json


def pack(metrics: Mapping[str, Any]) -> str:
    """Metrics as one line of text."""
    return base64.b64encode(zlib.compress(to_json(metrics).encode(), 9)).decode("ascii")


def unpack(text: str) -> dict[str, Any]:
    """The metrics that were packed."""
    return json.loads(zlib.decompress(base64.b64decode(text)))
