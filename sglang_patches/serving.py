"""The engine of this rank: made when the model is loaded, one in a process.

It is imported where it is made. It brings ``prometheus_client``, which chooses when it is imported whether its counts
are for this process alone; SGLang lets all processes share them, but says so only after plugins were loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from redknot.comm.group import Group, OneProcess, TorchGroup
from redknot.errors import ConfigError
from sglang_patches.launch import options_of

if TYPE_CHECKING:
    from redknot.serving.engine import ServingEngine

_engine: ServingEngine | None = None


def engine() -> ServingEngine | None:
    """The engine, once the model is loaded."""
    return _engine


def start(**more: Any) -> ServingEngine:
    """Load the model of SGLang's arguments; ConfigError where they were not made by this plugin.

    ``more`` goes to the engine as it is: the device that it runs on, where that is not the CPU. A page of SGLang's may
    hold several of the engine's.
    """
    global _engine
    from sglang.srt.runtime_context import get_parallel, get_server_args

    from redknot.runtime.metrics import Metrics
    from redknot.serving.engine import ServingEngine

    args = get_server_args()
    options = options_of(args)
    if options is None:
        raise ConfigError("no RedKnot options came with the server's arguments; call sglang_patches.activate() first")
    group: Group = OneProcess()
    ranks = get_parallel().tp_group
    if ranks.world_size > 1:
        torch.set_num_threads(1)  # ranks share the cores
        group = TorchGroup(ranks.cpu_group)
    config = options.config
    _engine = ServingEngine(
        options.model,
        options.store,
        options.profile,
        # Page 0 is SGLang's dummy.
        pages=(args.max_total_tokens // args.page_size + 1) * (args.page_size // options.geometry.block_length),
        requests=args.max_running_requests + 1,  # and one that is prefilled in chunks
        context=args.context_length + options.geometry.block_length,
        group=group,
        namespace=config.namespace,
        shared=config.shared_namespace,
        read_timeout_s=config.read_timeout_s,
        profiles=config.profiles,
        metrics=Metrics(rank=ranks.rank_in_group),
        **more,
    )
    if args.enable_metrics:
        _engine.metrics.publish_every()
    return _engine
