"""From a row to the prompt that both arms get: cut in the middle first, then split into documents."""

from __future__ import annotations

from dataclasses import dataclass

from eval.longbench.rows import Row
from eval.prompt import Prompt
from eval.split import documents
from eval.truncate import Codec, middle_out


@dataclass(frozen=True)
class Built:
    """A prompt, and whether its middle was cut out to make it."""

    prompt: Prompt
    cut: bool


def build(row: Row, codec: Codec, limit: int, document_tokens: int) -> Built:
    """A row's prompt of at most ``limit`` tokens; a context without markers is split each ``document_tokens``.

    The limit is the whole text's. The parts are tokenised one by one, which may take a few tokens more.
    """
    whole = row.frame
    frame = middle_out(whole, limit, codec)
    split = documents(frame.context, row.task.marker, document_tokens, lambda text: len(codec.encode(text)))
    return Built(Prompt(frame.before, split, frame.after), frame is not whole)
