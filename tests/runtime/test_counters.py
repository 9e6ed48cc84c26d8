"""Counting experts where only the device knows how many ran: later, in one copy, to the same sums."""

from __future__ import annotations

import torch

from redknot.ops.moe import Routing
from redknot.runtime.counters import Counters

EXPERTS = torch.tensor([[0, 2, 1], [3, 1, 0], [2, 3, 1]])
KEPT = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])


def routing(kept: torch.Tensor | None) -> Routing:
    return Routing(EXPERTS, torch.ones(3, 3), kept)


def test_what_the_device_knows_is_counted_once_it_is_asked() -> None:
    for kept, ran in ((None, 9), (KEPT, 6), (KEPT, 4)):  # 4: the others are another rank's
        at_once, later = Counters(), Counters()
        at_once.add_experts(routing(kept), ran, 8, 4, 2)
        at_once.settle()
        for _ in range(2):
            later.add_experts(routing(kept), torch.tensor(ran), 8, 4, 2)
        later.settle()
        later.settle()  # nothing is left to count
        assert at_once.expert_pairs == ran
        assert at_once.expert_pairs_native == 9
        assert at_once.fan_out == ({3: 3} if kept is None else {1: 1, 2: 1, 3: 1})
        assert at_once.flops == 2 * (ran * 8 * 12 + 3 * 8 * 6)
        assert (later.expert_pairs, later.flops) == (2 * ran, 2 * at_once.flops)
        assert later.fan_out == {number: 2 * rows for number, rows in at_once.fan_out.items()}
