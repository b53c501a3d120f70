"""Checksums inside of JSON objects, by which a change by hand shows itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from zeromean.experiments.runs.json_files import plain


def checksum(content: Mapping[str, Any]) -> str:
    """A digest of everything in an object but its checksum."""
    rest = {key: value for key, value in content.items() if key != "checksum"}
    text = json.dumps(plain(rest), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The object with its checksum."""
    return {**content, "checksum": checksum(content)}


def is_changed(content: Mapping[str, Any]) -> bool:
    """Whether an object has a checksum, but that of something else."""
    return "checksum" in content and content["checksum"] != checksum(content)
