"""Text that may come from anybody (names of files and documents, say) as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, every character that is not printable (control, direction, surrogate) as its escape."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)
