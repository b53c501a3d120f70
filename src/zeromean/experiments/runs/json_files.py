"""JSON files that are written whole, and read with a sentence that says what is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromean.files.atomic import whole_file


def plain(value: Any) -> Any:
    """Tensors, arrays, tuples and paths as JSON has them; what is not finite becomes None."""
    if hasattr(value, "tolist"):  # Tensors and arrays, neither of which is imported for it.
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any, *, indent: int | None = None) -> str:
    """JSON of what `plain` makes of a value."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, all of it or nothing."""
    replace_text(path, to_json(value, indent=1) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a text, all of it or nothing."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def read_json(path: Path, *keys: str, remedy: str = "move its folder away") -> dict[str, Any]:
    """An object that has these keys."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged (it holds no object); {remedy}.")
    missing = sorted(set(keys) - value.keys())
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}, of another version perhaps; {remedy}."
        )
    return value
