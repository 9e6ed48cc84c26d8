"""Reading values of ``config.json``: each is checked for type and range, and refused by key and value."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redknot.errors import ConfigError

_LARGEST_COUNT = 2**31 - 1  # token ids are stored as int32
_LARGEST_NUMBER = 1e38  # float32 ends there


@dataclass(frozen=True)
class Values:
    """One JSON object; ``where`` stands in front of its keys in messages. A null counts as missing.

    Every method raises ConfigError for a value of another type or range, and for a missing one without a default.
    """

    found: Mapping[str, Any]
    where: str = ""

    def raw(self, key: str, default: object = None) -> Any:
        """The value as it is."""
        value = self.found.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json: {self.where}{key} is missing")
        return value

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self.found.get(key) is not None

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST_COUNT) -> int:
        """A whole number within bounds."""
        value = self.raw(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refused(key, f"a whole number from {least} to {most}")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = 0.0, most: float = _LARGEST_NUMBER
    ) -> float:
        """A number within bounds, which NaN and infinity are not."""
        value = self.raw(key, default)
        if type(value) not in (int, float) or not above < value <= most:
            raise self.refused(key, f"a number above {above:g} and at most {most:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(key, default)
        if type(value) is not bool:
            raise self.refused(key, "true or false")
        return value

    def items(self, key: str, kind: type) -> list[Any]:
        """A list of values of one type."""
        value = self.raw(key)
        if not isinstance(value, list | tuple) or not all(isinstance(item, kind) for item in value):
            raise self.refused(key, f"a list of {'names' if kind is str else 'whole numbers'}")
        return list(value)

    def inner(self, key: str) -> Values:
        """An object, empty when it is missing."""
        value = self.raw(key, {})
        if not isinstance(value, Mapping):
            raise self.refused(key, "an object")
        return Values(value, f"{self.where}{key}.")

    def refused(self, key: str, expected: str) -> ConfigError:
        """The error for a value that is there; a long or deep one is cut."""
        return ConfigError(f"config.json: {self.where}{key} is {reprlib.repr(self.found[key])}; it must be {expected}")
