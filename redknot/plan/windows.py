"""Which rows run again for window rows that an artifact does not keep: arithmetic over layers, blocks and positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from redknot.artifact.needs import Windows
from redknot.model.geometry import Geometry
from redknot.plan.rows import KnownRun


@dataclass(frozen=True)
class WindowPlan:
    """How the windows in front of position ``stop`` of a document are had: w rows of every layer.

    ``checkpoint`` is the position whose stored windows are read, 0 for none. In layer l rows [first[l], stop) leave
    their latents, and those of them that layer l + 1 wants, [first[l + 1], stop), run attention and experts and go on.

    Every row that runs is exact, given the document's entries. With L layers, first[l] is stop - (L - l) * w, or the
    checkpoint, or 0, whichever is highest. A row that goes on in layer l is at stop - (L - 1 - l) * w or behind, so its
    window reaches back to stop - (L - l) * w + 1 at most: a row that has left its latents here, or one of the
    checkpoint's w rows, or none of the document. By induction from the embeddings on, nothing that is absent is read.
    In the last layer the last w rows leave their latents. So L * w rows are enough for any document, without any error
    to die out; a shorter tail would read what is not there.
    """

    stop: int
    checkpoint: int
    first: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows that run in at least one layer."""
        return self.stop - self.first[0]


@dataclass(frozen=True)
class Rebuild:
    """How the last window rows of a run are had where the artifact does not keep them."""

    plan: WindowPlan
    token_ids: Tensor  # of the whole document, [n] int64


def checkpoint_before(geometry: Geometry, windows: Windows, stop: int) -> int:
    """The position of the checkpoint that recomputation for ``stop`` begins at; 0 where it begins without one.

    It is the last one at or before ``stop``, unless running the last L * w rows does not reach it.
    """
    if not windows.every:
        return 0
    every = windows.every * geometry.block_length
    last = stop // every * every
    return last if last > stop - geometry.num_layers * geometry.window else 0


def window_plan(geometry: Geometry, windows: Windows, stop: int) -> WindowPlan:
    """The plan for ``stop`` of a document whose artifact keeps ``windows``."""
    layers, checkpoint = geometry.num_layers, checkpoint_before(geometry, windows, stop)
    first = tuple(max(stop - (layers - layer) * geometry.window, checkpoint) for layer in range(layers))
    return WindowPlan(stop, checkpoint, first)


def ends(runs: Sequence[KnownRun]) -> dict[str, set[int]]:
    """Behind which positions of each document its runs end, by artifact in order of the runs."""
    found: dict[str, set[int]] = {}
    for run in runs:
        found.setdefault(run.artifact_id, set()).add(run.doc_start + run.length)
    return found
