"""Reuse without a store: artifacts as dictionaries, evaluated when they are wanted. For measuring, not for serving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from redknot.build.capture import evaluate
from redknot.latents.session import Session
from redknot.latents.workspace import Workspace
from redknot.model.policy import Policy
from redknot.plan.rows import Rows
from redknot.runtime.counters import Counters
from redknot.runtime.model import Model
from redknot.runtime.restore import Source, restored_session, segmented_session
from redknot.runtime.reuse import choose_rows

if TYPE_CHECKING:  # it needs pydantic, which what runs does not
    from redknot.build.target import Target


@dataclass(frozen=True)
class InMemory:
    """An artifact's sections, kept in a dictionary."""

    sections: dict[str, Tensor]

    def section(self, name: str) -> Tensor:
        """One section."""
        return self.sections[name]


def in_memory(model: Model, target: Target, documents: Sequence[Tensor]) -> list[InMemory]:
    """What a build for ``target`` makes of documents [n_i] int64."""
    made = evaluate(model, documents, target.needs, Counters(), heads=target.heads)
    return [InMemory(sections) for sections in made]


def restored_request(
    model: Model, memory: Workspace, sources: Sequence[Source], token_ids: Tensor, profile: Policy, room: int = 0
) -> tuple[Session, Rows]:
    """The session of a request over its documents' artifacts, and the rows that a profile runs of it."""
    runs = [source.run for source in sources]
    if profile.reuses_rows:
        session = restored_session(memory, sources, len(token_ids), room)
    else:
        session = segmented_session(memory, runs, len(token_ids), room)
    return session, choose_rows(model, session, runs, token_ids, profile, Counters())
