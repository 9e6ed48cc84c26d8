"""The slots of a pool as numbers: free, live or quarantined. No tensors."""

from __future__ import annotations

from redknot.errors import StoreError
from redknot.latents.books import Book, differences

_FREE, _LIVE, _QUARANTINED = range(3)


class Slots:
    """``capacity`` slots of ``nbytes`` bytes; the caller holds the lock of the store."""

    def __init__(self, capacity: int, nbytes: int) -> None:
        self.capacity = capacity
        self.nbytes = nbytes
        self._free = list(range(capacity - 1, -1, -1))  # taken from the end: the slot freed last is warm
        self._state = bytearray(capacity)
        self._quarantined = 0

    @property
    def free(self) -> int:
        """Slots that can be taken."""
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, live from now on; None when there is none."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._state[slot] = _LIVE
        return slot

    def take_up_to(self, count: int) -> list[int]:
        """As many free slots as there are, ``count`` at most; live from now on."""
        if not self._free:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - len(taken) :]
        for slot in taken:
            self._state[slot] = _LIVE
        return taken

    def give(self, slot: int) -> None:
        """Free a live slot; StoreError for any other."""
        self._leave(slot, _FREE)
        self._free.append(slot)

    def quarantine(self, slot: int) -> None:
        """Take a live slot out of use for good; StoreError for any other."""
        self._leave(slot, _QUARANTINED)
        self._quarantined += 1

    def book(self) -> Book:
        """Bytes of all slots."""
        live = self.capacity - len(self._free) - self._quarantined
        return Book(self.capacity * self.nbytes, live * self.nbytes, self._quarantined * self.nbytes)

    def recount(self, what: str, holders: list[int]) -> list[str]:
        """Differences between the books and the slots that ``holders`` say they hold, one entry a holder."""
        states = [self._state.count(state) for state in (_FREE, _LIVE, _QUARANTINED)]
        live = [slot for slot, state in enumerate(self._state) if state == _LIVE]
        free = [slot for slot, state in enumerate(self._state) if state == _FREE]
        return [
            *differences(f"{what} slots held", sorted(holders), live),
            *differences(f"{what} slots free", sorted(self._free), free),
            *differences(f"{what} slots quarantined", self._quarantined, states[_QUARANTINED]),
            *differences(f"{what} slots", self.capacity, sum(states)),
        ]

    def _leave(self, slot: int, state: int) -> None:
        if self._state[slot] != _LIVE:
            raise StoreError(f"slot {slot} is not in use and cannot be given back")
        self._state[slot] = state
