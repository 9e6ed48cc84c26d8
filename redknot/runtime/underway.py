"""One request on its way through the engine: what was asked, and what has been decided so far."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from torch import Tensor

from redknot.errors import RequestReason
from redknot.plan.planner import Plan, Span
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters

_log = logging.getLogger(__name__)


@dataclass
class Underway:
    """Ids [n] and the client's document spans; the rest fills while the request runs."""

    token_ids: Tensor
    spans: list[Span] | None  # None: documents are to be found in the ids
    started: float
    counters: Counters = field(default_factory=Counters)
    plan: Plan | None = None
    rows: Rows | None = None
    vote: int = 0  # stands for what would be read
    reason: RequestReason | None = None
    detail: str = ""
    wall: dict[str, float] = field(default_factory=dict)

    def refuse(self, reason: RequestReason, detail: str) -> None:
        """Run dense, for this reason; the first one counts."""
        if self.reason is None:
            self.reason, self.detail = reason, detail

    def log_reason(self, outcome: str) -> None:
        """Say that it is ``outcome`` ("dense", "refused"), and why: a warning unless that is what one expects."""
        expected = self.reason in (RequestReason.REUSE_OFF, RequestReason.NOTHING_TO_REUSE)
        level = logging.INFO if expected else logging.WARNING
        _log.log(level, "%s: %s (%s)", outcome, self.reason, self.detail)
