"""Head tables in which layers and groups differ, so that a table read at the wrong place shows."""

from __future__ import annotations

import numpy as np

from redknot.model.geometry import Geometry
from redknot.model.heads import HeadTable


def mixed_table(geometry: Geometry, per_group: int = 1, seed: int = 0) -> HeadTable:
    """Random positions, other ones in every layer and group as far as there are any."""
    rng = np.random.default_rng(seed)
    layers = [
        [rng.permutation(geometry.heads_per_group)[:per_group].tolist() for _ in range(geometry.o_groups)]
        for _ in range(geometry.num_layers)
    ]
    return HeadTable.model_validate({"heads_per_group": geometry.heads_per_group, "positions": layers})
