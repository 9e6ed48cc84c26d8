"""How large a latent store is: frozen, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from redknot.errors import ConfigError
from redknot.latents.policy import POLICIES


@dataclass(frozen=True)
class StoreConfig:
    """Sizes of a store in bytes; a tier whose budget holds no block does not exist."""

    layout: bytes  # what identifies the layout of the blocks: views.layout_digest
    block_bytes: int
    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    disk_folder: Path | None = None
    arena_bytes: int = 0  # of one arena
    arenas: int = 0
    device: str = "cpu"
    queue: int = 64  # moves that may wait for the worker
    eviction: str = "lru"  # which block leaves memory first, of policy.POLICIES

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be."""
        if self.block_bytes <= 0 or self.block_bytes % 8:
            raise ConfigError(f"block_bytes is {self.block_bytes}; it must be a positive multiple of 8")
        if self.device_bytes < self.block_bytes:
            raise ConfigError(f"device_bytes is {self.device_bytes}, less than one block of {self.block_bytes}")
        if min(self.host_bytes, self.disk_bytes, self.arena_bytes, self.arenas) < 0 or self.queue < 1:
            raise ConfigError("budgets of the latent store must not be negative, and its queue must hold a move")
        if self.eviction not in POLICIES:
            raise ConfigError(f"the eviction policy {self.eviction!r} is none of {', '.join(POLICIES)}")
        if self.disk_bytes and self.disk_folder is None:
            raise ConfigError("disk_bytes is set and disk_folder is not; the disk tier needs a folder")
