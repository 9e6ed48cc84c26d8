"""The table of LongBench's sets: `tasks.toml` as frozen values, looked up by exact name."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from types import MappingProxyType

from redknot.errors import InputError


@dataclass(frozen=True)
class Task:
    """One set, with the benchmark's own values; `tasks.toml` says what each field means."""

    name: str
    language: str
    metric: str
    max_new_tokens: int
    chat: bool
    first_line: bool
    stop_at_newline: bool
    longbench_e: bool
    template: str
    marker: str | None = None

    def file_stem(self, longbench_e: bool = False) -> str:
        """The published file's name without ".jsonl"; InputError when LongBench-E lacks the set."""
        if longbench_e and not self.longbench_e:
            names = ", ".join(task.name for task in tasks().values() if task.longbench_e)
            raise InputError(f"LongBench-E has no {self.name}; it has {names}")
        return f"{self.name}_e" if longbench_e else self.name


@lru_cache(maxsize=1)
def tasks() -> MappingProxyType[str, Task]:
    """All sets by name, in the benchmark's order."""
    table = tomllib.loads(files("eval.longbench").joinpath("tasks.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: Task(name=name, **values) for name, values in table.items()})


def task(name: str) -> Task:
    """One set; InputError for a name that is not LongBench's."""
    try:
        return tasks()[name]
    except KeyError:
        raise InputError(f"LongBench has no set {name!r}; it has {', '.join(tasks())}") from None
