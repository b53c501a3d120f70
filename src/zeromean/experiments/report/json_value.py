"""A JSON value that knows where it stands, so that a fault names the file and the key."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn


@dataclass(frozen=True)
class JsonValue:
    """A JSON value that knows where it stands."""

    content: Any
    path: Path
    trail: str

    def fail(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.path}: {self.trail or 'the record'} {problem}")

    def expect(self, kind: type | tuple[type, ...], wanted: str) -> Any:
        """The content, if it is of a kind; `wanted` says it in words."""
        # JSON's true is not a number, though Python's True is.
        is_number = kind in (int, (int, float))
        if not isinstance(self.content, kind) or (is_number and isinstance(self.content, bool)):
            self.fail(f"must be {wanted}, got {_shorten(self.content)}.")
        if isinstance(self.content, int) and abs(self.content) > sys.float_info.max:
            self.fail(f"must be {wanted} that is not too large, got {_shorten(self.content)}.")
        return self.content

    def __getitem__(self, key: str) -> JsonValue:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path}: {self._name(key)} is missing.")
        return value

    def get(self, key: str) -> JsonValue | None:
        content = self.object()
        return JsonValue(content[key], self.path, self._name(key)) if key in content else None

    def __iter__(self) -> Iterator[JsonValue]:
        for index, item in enumerate(self.expect(list, "a list")):
            yield JsonValue(item, self.path, f"{self.trail}[{index}]")

    def _name(self, key: str) -> str:
        return f"{self.trail}.{key}" if self.trail else key

    def object(self) -> dict[str, Any]:
        return self.expect(dict, "an object")

    def text(self) -> str:
        return self.expect(str, "text")

    def flag(self) -> bool:
        return self.expect(bool, "true or false")

    def integer(self) -> int:
        return self.expect(int, "a whole number")

    def number(self) -> float:
        number = self.expect((int, float), "a number")
        return number if math.isfinite(number) else self.fail(f"must be finite, got {number}.")

    def choice(self, choices: tuple[str, ...]) -> str:
        if self.content not in choices:
            self.fail(f"must be one of {', '.join(choices)}, got {_shorten(self.content)}.")
        return self.content

    def numbers(self) -> list[float | None]:
        """A list of numbers; null, NaN and the infinities are gaps."""
        return [
            None if _is_gap(item.content) else item.expect((int, float), "a number or null")
            for item in self
        ]

    def positions(self) -> list[float | str | None]:
        """A list of numbers or names of categories."""
        return [
            None if _is_gap(item.content) else item.expect((int, float, str), "a number or text")
            for item in self
        ]


def _is_gap(content: Any) -> bool:
    return content is None or (isinstance(content, float) and not math.isfinite(content))


def _shorten(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
