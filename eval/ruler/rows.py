"""RULER rows, from the published JSON lines: which kind of task each is, and the parts of its prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.lines import Record, read_records
from eval.prompt import Frame, Prompt
from eval.split import documents
from eval.truncate import Codec


@dataclass(frozen=True)
class Kind:
    """One kind of RULER task: how its prompt begins and ends, its output cap, and how its answers are matched."""

    name: str
    before: re.Pattern[str]
    after: re.Pattern[str]
    max_new_tokens: int
    match_all: bool = True  # every output is to be named; else one of them is enough
    marker: str | None = None


def _kind(
    name: str, before: str, after: str, max_new_tokens: int, match_all: bool = True, marker: str | None = None
) -> Kind:
    # The greedy start leaves the last question as the end: a worked example in front of it belongs to the context.
    end = re.compile(rf".*(?P<after>{after})", re.DOTALL)
    return Kind(name, re.compile(before), end, max_new_tokens, match_all, marker)


KINDS = (
    _kind("niah", r"(?:Some|A) special magic [^\n]*\n", r"\nWhat (?:are all|is) the special magic .*", 128),
    _kind("vt", r"Memorize and track the chain[^\n]*\n\n", r"\nQuestion: Find all variables .*", 30),
    _kind("cwe", r"Below is a numbered list of words\.[^\n]*\n", r"\nQuestion: What are the 10 most common .*", 120),
    _kind("fwe", r"Read the following coded text .*? coded words\. ", r"\nQuestion: Do not provide any .*", 50),
    _kind(
        "qa",
        r"Answer the question based on the given documents\.[^\n]*\n\n[^\n]*\n\n",
        r"\n\nAnswer the question based on the given documents\..*",
        32,
        match_all=False,
        marker=r"^Document \d+:",
    ),
)


@dataclass(frozen=True)
class Row:
    """One prompt with its outputs; ``length`` is the publisher's, in the tokens of the publisher's tokenizer."""

    kind: Kind
    index: int
    frame: Frame
    outputs: tuple[str, ...]
    length: int
    source: str  # "file:line"

    def prompt(self, codec: Codec, document_tokens: int) -> Prompt:
        """The prompt with its context split: documents where it is made of them, else lines put together."""
        split = documents(self.frame.context, self.kind.marker, document_tokens, lambda text: len(codec.encode(text)))
        return Prompt(self.frame.before, split, self.frame.after)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file; InputError names file and line, also for a prompt that is none of RULER's."""
    for record in read_records(path):
        yield _row(record)


def _row(record: Record) -> Row:
    # Files of newer generators keep the beginning of the answer apart; the model is to go on from it all the same.
    text = record.text("input") + (record.text("answer_prefix") if "answer_prefix" in record.fields else "")
    kind, frame = _framed(text, record)
    return Row(kind, record.count("index"), frame, record.texts("outputs"), record.count("length"), record.source)


def _framed(text: str, record: Record) -> tuple[Kind, Frame]:
    for kind in KINDS:
        before = kind.before.match(text)
        after = kind.after.fullmatch(text, before.end()) if before else None
        if before and after:
            start, end = before.end(), after.start("after")
            return kind, Frame(text[:start], text[start:end], text[end:])
    names = ", ".join(kind.name for kind in KINDS)
    raise record.refuse(f'"input" begins and ends as none of RULER\'s prompts ({names}): {text[:50]!r}')
