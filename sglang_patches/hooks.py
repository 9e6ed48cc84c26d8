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
    """Apply hooks; ConfigError names those that cannot be.

    They are not registered: SGLang only logs what it cannot apply, and applies nothing to a target a second time, so
    that a hook of another plugin on one of ours would be lost, or hide that ours was.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    missing = []
    for hook in hooks:
        try:
            HookRegistry._apply_target(hook.target, [(HookType[hook.kind], hook.function, None)])
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            missing.append(f"{hook.target} ({' '.join(str(error).split())})")
    if missing:
        raise ConfigError(f"this SGLang has no {', '.join(missing)}; the plugin cannot serve with it")
