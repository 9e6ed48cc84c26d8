"""RULER rows as items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from eval.encoder import Encoder
from eval.items import DataSet, Item
from eval.ruler.rows import Row, read_rows
from eval.ruler.score import score
from redknot.errors import InputError


def datasets(files: Sequence[Path], encoder: Encoder, document_tokens: int) -> list[DataSet]:
    """A data set of each file, named by the file, or by its folder too where files of several have one name."""
    stems = Counter(_stem(path) for path in files)
    names = [_stem(path) if stems[_stem(path)] == 1 else f"{path.parent.name}-{_stem(path)}" for path in files]
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"--files: {count} files would be the data set {name}; run them one by one")
    return [_dataset(name, path, encoder, document_tokens) for name, path in zip(names, files, strict=True)]


def _dataset(name: str, path: Path, encoder: Encoder, document_tokens: int) -> DataSet:
    def items() -> Iterator[Item]:
        for row in read_rows(path):
            yield item(name, row, encoder, document_tokens)

    return DataSet(name, items)


def item(dataset: str, row: Row, encoder: Encoder, document_tokens: int) -> Item:
    """One row as published; InputError when it is too long for the model, since a needle must not be cut out."""
    found = Item(
        dataset=dataset,
        id=str(row.index),
        cluster=str(row.index),
        parts=row.prompt(encoder.tokenizer, document_tokens).parts,
        references=row.outputs,
        max_new_tokens=row.kind.max_new_tokens,
        score=partial(score, row),
    )
    room = encoder.max_positions - row.kind.max_new_tokens
    if (tokens := len(encoder.encode(found))) > room:
        raise InputError(f"{row.source}: {tokens} tokens, the model has room for {room}; use shorter files of RULER")
    return found


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".jsonl")
