"""One request on its way through the engine: what has been decided, what it ran, and the memory it holds."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor

from redknot.errors import RequestReason
from redknot.latents.space import LatentSpace
from redknot.latents.workspace import Workspace
from redknot.plan.planner import Plan, Span
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters

_log = logging.getLogger(__name__)


@dataclass
class Request:
    """Token ids [n] int64, the client's document spans, and everything that was found out since."""

    token_ids: Tensor
    spans: list[Span] | None  # None: documents are to be found in the ids
    started: float
    memory: ExitStack  # closes the workspace
    workspace: Workspace | None = None  # of the attempt that runs, or that answered
    counters: Counters = field(default_factory=Counters)
    plan: Plan | None = None
    rows: Rows | None = None
    cached: int = 0  # tokens at the start that a prefix cache had
    certified: int = 0  # certificates that held
    vote: int = 0  # stands for what would be read
    reason: RequestReason | None = None
    detail: str = ""
    wall: dict[str, float] = field(default_factory=dict)

    def refuse(self, reason: RequestReason, detail: str) -> None:
        """Run dense, for this reason; the first one counts."""
        if self.reason is None:
            self.reason, self.detail = reason, detail

    def log_reason(self, outcome: str) -> None:
        """Log why the request runs dense, or is refused."""
        expected = self.reason in (RequestReason.REUSE_OFF, RequestReason.NOTHING_TO_REUSE)
        level = logging.INFO if expected else logging.WARNING
        _log.log(level, "%s: %s (%s)", outcome, self.reason, self.detail)

    def workspace_of(self, space: LatentSpace, namespace: str) -> Workspace:
        """Memory for one attempt at the request; what an earlier one held is given back first.

        PoolFullError when all arenas are in use.
        """
        self.memory.close()
        self.workspace = self.memory.enter_context(Workspace(space, namespace))
        return self.workspace
