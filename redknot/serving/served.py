"""A request between its admission and its end, and the session that holds its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from redknot.latents.session import Session
from redknot.runtime.agreement import Agreement
from redknot.runtime.progress import Request
from redknot.runtime.reading import Reading
from redknot.runtime.restore import Source
from redknot.runtime.reuse import Stages
from redknot.serving.batch import Admission, Ask, CachedPages


@dataclass
class Served:
    """``branch`` is the extra key of its pages; with one, rows may come from artifacts."""

    request: Request
    ask: Ask
    agreement: Agreement | None = None  # None: no reuse was asked for
    branch: str | None = None
    exact: str | None = None  # the extra key of exact pages that it may see
    cached_pages: CachedPages | None = None
    sources: list[Source] = field(default_factory=list)  # certified; what is to be reused
    reading: Reading | None = None  # of all that is used of them
    session: Session | None = None
    stages: Stages | None = None  # of a prefill that reuses
    at: int = 0  # rows [0, at) are in the session
    keeps_pages: bool = True
    prefilled: bool = False
    reported: bool = False
    failed: bool = False
    admission: Admission | None = None

    def leave(self) -> None:
        """Give back all memory; the request may come back and go on from its pages."""
        self.request.memory.close()
        self.session = self.stages = None
        self.at = 0
        self.prefilled = False

    def end(self) -> None:
        """It does not come back."""
        if self.reading is not None:
            self.reading.close()
