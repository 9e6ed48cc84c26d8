"""What a request reads of artifacts, on its way to the device: pinned host memory, a stream of its own, and events.

The reading thread reads and verifies a section, copies it to pinned memory and queues the copy to the device; behind
the last section of a group of layers it records an event. The stream that computes waits for the event, on the device,
before the first of these layers; the host waits for neither. Unverified on hardware.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from redknot.artifact.schema import parse_section
from redknot.runtime.restore import Sections

STAGED = ("entries", "index_keys", "window")  # read once, whole; of the others a request takes rows, chunk by chunk


class CopyStream:
    """Copies to a CUDA device that run beside what computes there."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        """``cuda`` is torch.cuda, or what stands in for it."""
        self._device, self._cuda = device, cuda
        self._stream = cuda.Stream(device)

    def copy(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, once the copy that is queued here is done; for ``use`` only."""
        pinned = tensor.pin_memory()  # torch keeps it until the copy is done
        with self._cuda.stream(self._stream):
            return pinned.to(self._device, non_blocking=True)

    def mark(self) -> Any:
        """An event behind everything that was queued so far."""
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any) -> None:
        """Let what this thread queues from now on run after an event."""
        self._cuda.current_stream(self._device).wait_event(event)

    def use(self, tensor: Tensor) -> Tensor:
        """A copied tensor for what this thread queues; its memory is not given to another copy before that ran."""
        tensor.record_stream(self._cuda.current_stream(self._device))
        return tensor


class StagedSections:
    """The sections of an artifact for one request: on the device what was staged there, else on the host."""

    def __init__(self, sections: Sections, copies: CopyStream) -> None:
        self._sections, self._copies = sections, copies
        self._staged: dict[str, Tensor] = {}

    def section(self, name: str) -> Tensor:
        """One stored tensor; raises StoreError when it cannot be trusted."""
        staged = self._staged.get(name)
        return self._sections.section(name) if staged is None else self._copies.use(staged)

    def stage(self, name: str) -> None:
        """Read a section and, where it is used whole, begin to copy it; raises as ``section``."""
        read = self._sections.section(name)
        if parse_section(name).kind in STAGED and name not in self._staged:
            self._staged[name] = self._copies.copy(read)

    def drop(self) -> None:
        """Give the device's copies back, once nothing more is filled from them."""
        self._staged.clear()
