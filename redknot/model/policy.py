"""What the fields of a reuse profile mean: for whatever holds them, checked or not.

``redknot.model.profile.Profile`` is what users write, with every field checked; what runs rows asks for this.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from redknot.errors import ConfigError
from redknot.model.geometry import Geometry

if TYPE_CHECKING:
    from redknot.model.heads import HeadTable


class Treatment(StrEnum):
    """What a row does in a layer."""

    FULL = "full"  # all heads online
    GLOBAL_Z = "global+z"  # Global heads online, the stored Local contribution restored
    SKIP = "skip"  # does not run; its latents come from the artifact


class Selector(StrEnum):
    """Who picks rows inside documents."""

    NONE = "none"
    INDEXER = "indexer"  # a probe pass of the last query rows, ranked by the model's own indexers
    DEVIATION = "deviation"  # how far stored latents of one layer are from those that this request computes there


class Widths(Protocol):
    """Document rows that always run; the fields are those of ``profile.Protected``."""

    @property
    def first_windows(self) -> int:
        """Windows at the start of each relocated run."""

    @property
    def last_windows(self) -> int:
        """Windows at its end."""

    @property
    def recent_tail(self) -> int:
        """Tokens before the end of the request."""

    @property
    def indexed_share(self) -> float:
        """Cap of the rows a selector protects, of candidates."""


class Shares(Protocol):
    """How many experts run; the fields are those of ``profile.FanOutPolicy``."""

    @property
    def k_min(self) -> int:
        """The fewest."""

    @property
    def tau(self) -> float:
        """The share of the weights that they must reach."""


class Policy:
    """What follows from a profile's fields; whoever inherits has them, as ``profile.Profile`` says."""

    if TYPE_CHECKING:  # pydantic would take them for fields of its own
        fence_layers: int
        fence_idle: Treatment
        middle_active: Treatment
        middle_idle: Treatment
        protected: Widths
        selector: Selector
        deviation_layer: int
        budget: float
        fan_out: Shares | None

    @property
    def reuses(self) -> bool:
        """Whether anything is reused at all (``recompute`` does not)."""
        return self.middle_idle is not Treatment.FULL

    @property
    def reuses_rows(self) -> bool:
        """Whether some rows are read from artifacts instead of run."""
        return self.middle_idle is Treatment.SKIP

    @property
    def picks_rows(self) -> bool:
        """Whether a selector ranks rows inside documents, to run the best of them."""
        return self.selector is not Selector.NONE and (self.budget > 0 or self.protected.indexed_share > 0)

    @property
    def splits_heads(self) -> bool:
        """Whether some rows run their Global heads only."""
        return Treatment.GLOBAL_Z in (self.middle_active, self.middle_idle)

    @property
    def runs_inside_documents(self) -> bool:
        """Whether rows away from a document's ends may run in middle layers and read their neighbours' windows."""
        inside = self.budget > 0 or self.protected.indexed_share > 0 or self.protected.recent_tail > 0
        return self.middle_idle is not Treatment.SKIP or inside or self.protected.last_windows > 0

    def row_needs(self) -> tuple[str, ...]:
        """What an artifact must hold of rows that do not run, sorted."""
        if not self.reuses_rows:
            return ()
        needs = {"latents", "window_all" if self.runs_inside_documents else "window_tail"}
        if self.fence_idle is Treatment.FULL and self.fence_layers:
            needs.add(f"streams:{self.fence_layers}")
        return tuple(sorted(needs))

    def heads(self, geometry: Geometry) -> HeadTable:
        """The Global heads of every layer and group of a model; ConfigError for a policy that has none."""
        raise ConfigError("this policy splits no heads")
