"""Stand-ins for what a batch's way through the adapter needs of SGLang, whose modules need a GPU's libraries."""

from __future__ import annotations

import sys
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class AddReqResult(Enum):
    CONTINUE = auto()
    OTHER = auto()


class LogitsProcessorOutput(SimpleNamespace):
    customized_info = None


def _abort(message: str, status: int) -> str:
    return f"{int(status)} {message}"


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules of SGLang with one name each; ``slots`` is the table of requests' slots, [requests, tokens]."""
    state = SimpleNamespace(slots=torch.zeros(8, 4096, dtype=torch.int64), AddReqResult=AddReqResult)
    names: dict[str, dict[str, Any]] = {
        "layers.logits_processor": {"LogitsProcessorOutput": LogitsProcessorOutput},
        "managers.schedule_batch": {"FINISH_ABORT": _abort},
        "managers.schedule_policy": {"AddReqResult": AddReqResult},
        "model_executor.forward_context": {
            "get_req_to_token_pool": lambda: SimpleNamespace(req_to_token=state.slots),
        },
    }
    for name, content in names.items():
        parts = ["sglang", "srt", *name.split(".")]
        for count in range(1, len(parts) + 1):
            place = ".".join(parts[:count])
            if not isinstance(sys.modules.get(place), _Module):
                monkeypatch.setitem(sys.modules, place, _Module(place))
        vars(sys.modules[f"sglang.srt.{name}"]).update(content)
    return state


class _Module(ModuleType):
    __path__: list[str] = []  # noqa: RUF012  a package
