"""A prompt in parts: the text in front of the context, the context whole or as documents, the text behind it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """A prompt whose context is still one text."""

    before: str
    context: str
    after: str

    @property
    def text(self) -> str:
        """The prompt as one text."""
        return self.before + self.context + self.after


@dataclass(frozen=True)
class Prompt:
    """A prompt whose context is split; the documents are what an engine may reuse."""

    before: str
    documents: tuple[str, ...]
    after: str

    @property
    def text(self) -> str:
        """The prompt as one text, the same as of the frame that it was split from."""
        return self.before + "".join(self.documents) + self.after

    @property
    def parts(self) -> tuple[tuple[str, bool], ...]:
        """The texts that are tokenised one by one, in order, and whether each is a document; none is empty."""
        parts = [(self.before, False), *((document, True) for document in self.documents), (self.after, False)]
        return tuple((text, is_document) for text, is_document in parts if text)


def fill(template: str, context: str, other: str = "") -> Frame:
    """A template's frame, with `other` in place of "{input}"; what stands in a row is never read as a template."""
    before, found, after = template.partition("{context}")
    if not found or "{context}" in after:
        raise ValueError(f"a template names {{context}} exactly once: {template!r}")
    return Frame(before.replace("{input}", other), context, after.replace("{input}", other))
