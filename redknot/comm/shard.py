"""Which part of the model one tensor-parallel rank holds: arithmetic over a frozen rank and world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redknot.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """Rank ``rank`` of ``world`` tensor-parallel ranks."""

    rank: int = 0
    world: int = 1

    def part(self, total: int) -> slice:
        """The contiguous part of ``total`` items that this rank holds; sizes differ by at most one."""
        return slice(self.rank * total // self.world, (self.rank + 1) * total // self.world)

    def check(self, totals: Mapping[str, int]) -> None:
        """Raise ConfigError unless every total (by the name of what is counted) divides among the ranks."""
        if not 0 <= self.rank < self.world:
            raise ConfigError(f"tensor parallel rank {self.rank} is not below the world size {self.world}")
        for name, total in totals.items():
            if total % self.world:
                raise ConfigError(f"{self.world} tensor parallel ranks do not divide {total} {name}")


SINGLE = Shard()
