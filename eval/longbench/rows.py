"""LongBench rows, from the published JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.lines import Record, read_records
from eval.longbench.tasks import Task, tasks
from eval.prompt import Frame, fill
from redknot.errors import InputError

SUFFIXES = (".jsonl", ".jsonl.gz")


@dataclass(frozen=True)
class Row:
    """One question: its context, the references, and the benchmark's own length (words, in Chinese characters)."""

    task: Task
    id: str
    language: str
    input: str
    context: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]  # of classification sets, else none
    length: int
    source: str  # "file:line"

    @property
    def frame(self) -> Frame:
        """The benchmark's prompt, its context still whole."""
        return fill(self.task.template, self.context, self.input)


def find_file(folder: Path, task: Task, longbench_e: bool = False) -> Path:
    """The published file of a set in a folder, plain or gzipped; InputError when there is none, or both."""
    stem = task.file_stem(longbench_e)
    found = [path for suffix in SUFFIXES if (path := folder / f"{stem}{suffix}").is_file()]
    if not found:
        raise InputError(f"{folder}: no {stem}.jsonl or {stem}.jsonl.gz; put LongBench's published files there")
    if len(found) > 1:
        raise InputError(f"{folder}: both {found[0].name} and {found[1].name}; leave one of them")
    return found[0]


def read_rows(path: Path, task: Task | None = None) -> Iterator[Row]:
    """The rows of a file, which may be of several sets unless ``task`` is given; InputError names file and line."""
    for record in read_records(path):
        row = _row(record)
        if task is not None and row.task != task:
            raise record.refuse(f'"dataset" is {row.task.name}, expected {task.name}')
        yield row


def _row(record: Record) -> Row:
    name = record.text("dataset")
    task = tasks().get(name) or tasks().get(name.removesuffix("_e"))
    if task is None:
        raise record.refuse(f'"dataset" is {name!r:.60}, which is no set of LongBench')
    context = record.text("context")
    if not context.strip():
        raise record.refuse('"context" is empty')
    classes = () if record.value("all_classes") is None else record.texts("all_classes")
    if task.metric == "classification" and not classes:
        raise record.refuse(f'"all_classes" is null, but {task.name} is scored against the names of its classes')
    return Row(
        task=task,
        id=record.text("_id"),
        language=record.text("language"),
        input=record.text("input"),
        context=context,
        answers=record.texts("answers"),
        classes=classes,
        length=record.count("length"),
        source=record.source,
    )
