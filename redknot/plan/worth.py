"""The break-even rule, in row-layers: the most that reuse can save, against what choosing its rows surely costs."""

from __future__ import annotations

from collections.abc import Sequence

from redknot.model.geometry import Geometry, LayerKind
from redknot.model.policy import Selector, Treatment
from redknot.model.profile import Profile
from redknot.plan.rows import KnownRun, repaired_rows


def skipped_layers(geometry: Geometry, profile: Profile) -> tuple[int, int]:
    """Of the layers in which recompute runs an idle row, those of the middle and all that a skipped one misses.

    A row that leaves after the first fence only leaves its latents in the fence's last layer, so it misses that too.
    The last layer does not count: recompute prunes it as well.
    """
    layers, fence = geometry.num_layers, profile.fence_layers
    middle = max(layers - 2 * fence, 0) - (fence == 0)
    if profile.fence_idle is Treatment.FULL and fence:
        return middle, middle + 1 if middle else 0
    return middle, layers - 1


def probe_row_layers(geometry: Geometry, profile: Profile, runs: Sequence[KnownRun], total: int) -> int:
    """Row-layers that the profile's selector runs to rank rows: what ``Counters.probe_row_layers`` then shows."""
    if not profile.picks_rows or not runs:
        return 0
    stop = runs[-1].stop
    if profile.selector is Selector.DEVIATION:
        return stop * profile.deviation_layer
    layers = geometry.num_layers - (geometry.kinds[-1] is not LayerKind.CSA)
    return min(geometry.window, total - stop) * layers


def saves_more_than_its_probe(geometry: Geometry, profile: Profile, runs: Sequence[KnownRun], total: int) -> bool:
    """Whether skipping every row that need not run saves more than the probe costs; true where there is no probe."""
    if not profile.picks_rows:
        return True
    repaired = [repaired_rows(run, total, profile, geometry.window, geometry.csa_ratio) for run in runs]
    idle = sum(run.length - int(mask.sum()) for run, mask in zip(runs, repaired, strict=True))
    return idle * skipped_layers(geometry, profile)[1] > probe_row_layers(geometry, profile, runs, total)
