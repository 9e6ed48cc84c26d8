"""RedKnot inside SGLang: a plugin that serves DeepSeek-V4 with reuse through SGLang's own server, unmodified.

``python -m sglang.launch_server --enable-redknot ...`` needs nothing else. In a process that makes its own
``sglang.Engine``, call :func:`activate` before the first import of ``sglang``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def activate(
    model_path: str | Path,
    *,
    store: str | Path,
    device: str = "cpu",
    profile: str = "rowsparse",
    config: str | Path | None = None,
    tp_size: int = 1,
) -> dict[str, object]:
    """Prepare this process for ``sglang.Engine(**activate(...))``, before ``sglang`` is imported.

    Returns the engine's arguments, to which others may be added. The options are those of the command line. Raises
    ConfigError when ``sglang`` was imported already, or where the command line would end with the same line.
    """
    from sglang_patches.embedded import prepare

    return prepare(model_path, device, store, profile, config, tp_size)
