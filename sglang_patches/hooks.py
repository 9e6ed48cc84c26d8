"""Every place where SGLang is hooked, why, and in which process: one table, applied and then verified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from redknot.errors import ConfigError


class Process(StrEnum):
    """Where a hook is needed. Patching imports its target, so that no process is given more than it uses."""

    PARENT = "parent"  # parses arguments, speaks HTTP, tokenises
    CHILD = "child"  # schedules and runs the model


@dataclass(frozen=True)
class Hook:
    """One hook; ``kind`` is the name of a ``HookType``."""

    target: str
    kind: str
    process: Process
    why: str
    function: Callable[..., Any]


def apply(hooks: list[Hook]) -> None:
    """Register and apply hooks; ConfigError names those that SGLang did not apply."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
    HookRegistry.apply_hooks()
    missing = [hook.target for hook in hooks if hook.target not in HookRegistry._patched]
    if missing:
        raise ConfigError(f"this SGLang has no {', '.join(missing)}; the plugin cannot serve with it")
