"""Which rows of a request run: row classes as boolean masks over request positions. No model, no latents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redknot.model.policy import Policy


@dataclass(frozen=True)
class KnownRun:
    """Tokens [doc_start, doc_start + length) of a known document at request position ``start``."""

    artifact_id: str
    start: int
    doc_start: int
    length: int
    doc_length: int

    @property
    def stop(self) -> int:
        """Request position behind the run."""
        return self.start + self.length

    @property
    def relocated(self) -> bool:
        """Whether it lies elsewhere than it was built; a document at position zero of a request is an exact prefix."""
        return self.start != self.doc_start or self.start != 0

    @property
    def whole(self) -> bool:
        """Whether it reaches its document's end, where window tails are kept."""
        return self.doc_start + self.length == self.doc_length


@dataclass(frozen=True)
class Rows:
    """Row classes of one request of ``total`` tokens; ``idle`` is what is neither protected nor active."""

    total: int
    protected: Tensor  # [total] bool
    active: Tensor  # [total] bool

    @property
    def running(self) -> Tensor:
        """Rows that run in every layer."""
        return self.protected | self.active


def repaired_rows(run: KnownRun, total: int, profile: Policy, window: int, group: int) -> Tensor:
    """Protected rows of one run as a mask [length]: B (first and last windows), the recent tail, the last row.

    B is whole groups of ``group`` tokens. The last row always runs, since its logits are wanted; its group runs with
    it where the rows in front of it can: where only tails of window latents are kept, they lack what to read.
    """
    mask = torch.zeros(run.length, dtype=torch.bool)
    if run.relocated:
        mask[: profile.protected.first_windows * window] = True
    if run.relocated and profile.protected.last_windows:
        last = run.length - profile.protected.last_windows * window
        mask[max(last, 0) // group * group :] = True
    if profile.protected.recent_tail:
        mask[max(total - profile.protected.recent_tail - run.start, 0) :] = True
    if run.stop == total:
        mask[(run.length - 1) // group * group if profile.runs_inside_documents else -1 :] = True
    return mask


def protected_rows(total: int, runs: Sequence[KnownRun], profile: Policy, window: int, group: int) -> Tensor:
    """Query, new text and each run's :func:`repaired_rows` as a mask [total]; picked rows come later."""
    mask = torch.ones(total, dtype=torch.bool)
    for run in runs:
        mask[run.start : run.stop] = repaired_rows(run, total, profile, window, group)
    return mask


def pick_rows(
    total: int, runs: Sequence[KnownRun], protected: Tensor, ranking: Tensor, profile: Policy, group: int, topk: int
) -> Rows:
    """Add picked protected (I) and Active rows by a ranking of groups, whichever selector made it.

    ``ranking`` [groups over all runs] scores each run's groups of ``group`` tokens in order (higher is better,
    ties to the lower position). A picked group brings the group before it in its run, because an entry is refreshed
    only if the group it overlaps ran too. I is the best ``topk`` groups, at most ``indexed_share`` of the
    candidates; Active the next ``budget`` of the candidates, groups that no longer fit left out. Shares count rows
    that really run.
    """
    starts = torch.cat([torch.arange(run.start, run.stop, group) for run in runs])
    stops = torch.cat([torch.arange(run.start, run.stop, group).add(group).clamp(max=run.stop) for run in runs])
    opens = torch.cat([torch.arange(0, run.length, group) == 0 for run in runs])
    in_runs = torch.zeros(total, dtype=torch.bool)
    for run in runs:
        in_runs[run.start : run.stop] = True
    candidates = int((in_runs & ~protected).sum())
    limits = (int(profile.protected.indexed_share * candidates), int(profile.budget * candidates))
    taken = protected.numpy().copy()
    picked = (np.zeros_like(taken), np.zeros_like(taken))
    first_of, stop_of, opens_run = starts.tolist(), stops.tolist(), opens.tolist()
    which, used, groups_used = 0, 0, 0
    for index in ranking.argsort(descending=True, stable=True).tolist():
        if which == 1 and used >= limits[1]:
            break
        lo, hi = first_of[index if opens_run[index] else index - 1], stop_of[index]
        fresh = ~taken[lo:hi]
        count = int(fresh.sum())
        if not count:
            continue
        if which == 0 and (used + count > limits[0] or groups_used >= topk):
            which, used = 1, 0  # I ends with the first group that exceeds it, and that one is the next for Active
        if used + count > limits[which]:
            continue
        picked[which][lo:hi] |= fresh
        taken[lo:hi] = True
        used, groups_used = used + count, groups_used + 1
    return Rows(total, protected | torch.from_numpy(picked[0]), torch.from_numpy(picked[1]))
