"""LongBench rows as items whose token ids fit a limit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from eval.encoder import Encoder
from eval.items import DataSet, Item
from eval.longbench.prompts import build
from eval.longbench.rows import Row, find_file, read_rows
from eval.longbench.score import bucket, score
from eval.longbench.tasks import Task


def dataset(
    folder: Path, task: Task, longbench_e: bool, encoder: Encoder, limit: int | None, document_tokens: int
) -> DataSet:
    """A set from a folder of published files; ``limit`` is of prompt tokens, by default all that the model has.

    InputError when the file is missing, or LongBench-E lacks the set.
    """
    path = find_file(folder, task, longbench_e)
    room = encoder.max_positions - task.max_new_tokens

    def items() -> Iterator[Item]:
        for row in read_rows(path, task):
            yield item(row, longbench_e, encoder, room if limit is None else min(limit, room), document_tokens)

    return DataSet(task.file_stem(longbench_e), items)


def item(row: Row, longbench_e: bool, encoder: Encoder, limit: int, document_tokens: int) -> Item:
    """One row. The benchmark's limit counts the whole text; parts tokenised alone, BOS and a chat's frame may take a
    few tokens more, so that the text is cut as much shorter as it takes for the ids to fit."""
    shorter = limit
    while True:
        built = build(row, encoder.tokenizer, shorter, document_tokens)
        found = Item(
            dataset=row.task.file_stem(longbench_e),
            id=row.id,
            cluster=row.id,
            parts=built.prompt.parts,
            references=row.answers,
            max_new_tokens=row.task.max_new_tokens,
            score=partial(score, row),
            group=bucket(row.length) if longbench_e else "",
            cut=built.cut,
            stop_at_newline=row.task.stop_at_newline,
            chat=row.task.chat,
        )
        over = len(encoder.encode(found)) - limit
        if over <= 0:
            return found
        shorter -= over
