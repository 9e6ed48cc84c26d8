"""The middle of a prompt cut out, as LongBench does it: the first and the last half of its tokens stay.

The benchmark cuts the whole prompt, template included, decodes both halves and puts the texts together; the text is
tokenised again afterwards. Here the cut is made in the same place and the prompt keeps its parts, so that what is left
of the context can be split into documents. A character that the cut goes through becomes U+FFFD, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from eval.prompt import Frame
from redknot.errors import InputError

LOST = "\N{REPLACEMENT CHARACTER}"


class Codec(Protocol):
    """What is needed of a tokenizer; `redknot.model.tokenizer.Tokenizer` is one."""

    bos_id: int | None

    def encode(self, text: str) -> Sequence[int]:
        """Ids of a text, no special token added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids."""
        ...


def middle_out(frame: Frame, limit: int, codec: Codec) -> Frame:
    """A frame of at most ``limit`` tokens, the same one when it is no longer than that.

    A BOS counts, as the benchmark's tokenizers put one in front: it takes one place of the first half. An odd limit
    leaves one token less than it allows. InputError when the codec does not give a text back as it was.
    """
    if limit < 2:
        raise InputError(f"a limit of {limit} tokens has no two halves; give at least 2")
    text = frame.text
    ids = codec.encode(text)
    special = 0 if codec.bos_id is None else 1
    if len(ids) + special <= limit:
        return frame
    half = limit // 2
    head, tail = codec.decode(ids[: half - special]), codec.decode(ids[len(ids) - half :])
    if not (text.startswith(head.rstrip(LOST)) and text.endswith(tail.lstrip(LOST))):
        raise InputError("this tokenizer does not give a text back as it was, so a cut cannot be placed in it")
    return _framed(frame, head, tail)


def _framed(frame: Frame, head: str, tail: str) -> Frame:
    """The parts of a frame of which only ``head`` and ``tail`` are left."""
    kept = head + tail
    behind = len(frame.after)
    start = _place(len(frame.before), behind + len(frame.context), len(head), len(tail))
    end = _place(len(frame.before) + len(frame.context), behind, len(head), len(tail))
    return Frame(kept[:start], kept[start:end], kept[end:])


def _place(from_start: int, from_end: int, head: int, tail: int) -> int:
    """Where a border of the whole text lies in what is left of it; one that was cut away lies at the seam."""
    if from_start <= head:
        return from_start
    return head + max(0, tail - from_end)
