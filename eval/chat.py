"""What a chat model has around a user's prompt, as token ids: V4's own encoding, or the checkpoint's chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from redknot.errors import ConfigError
from redknot.model.tokenizer import TOKENIZER_FILE

# Of a request without a system text, without tools, and without thinking; the model's own BOS comes in front.
_V4_BEFORE, _V4_AFTER = ("<｜User｜>",), ("<｜Assistant｜>", "</think>")
_PLACE = "{{prompt}}"  # where the user's text comes to stand in a rendered template


@dataclass(frozen=True)
class Chat:
    """Ids in front of a prompt, BOS left out, and behind it."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def load_chat(checkpoint: Path, bos_id: int | None) -> Chat | None:
    """The chat form of a checkpoint; None where it has none, ConfigError for a template that cannot be used.

    A tokenizer with V4's role markers is encoded as V4's, which is published as code and not as a template.
    """
    tokenizer = Tokenizer.from_file(str(checkpoint / TOKENIZER_FILE))
    before, after = ([tokenizer.token_to_id(marker) for marker in markers] for markers in (_V4_BEFORE, _V4_AFTER))
    if None not in (*before, *after):
        return Chat(tuple(before), tuple(after))
    rendered = _rendered(checkpoint)
    if rendered is None:
        return None
    front, back = (tokenizer.encode(text, add_special_tokens=False).ids for text in rendered)
    return Chat(tuple(front[1:] if bos_id is not None and front[:1] == [bos_id] else front), tuple(back))


def _rendered(checkpoint: Path) -> tuple[str, str] | None:
    """The texts of a chat template around a user's prompt."""
    if not _has_template(checkpoint):
        return None
    from transformers import PreTrainedTokenizerFast  # takes seconds, and only a template needs it

    try:
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(checkpoint, local_files_only=True)
        messages = [{"role": "user", "content": _PLACE}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # noqa: BLE001  whatever a template or its renderer raises
        raise ConfigError(
            f"{checkpoint}: its chat template cannot be used ({error}); --no-chat leaves it out"
        ) from None
    before, _, after = text.partition(_PLACE)
    if text.count(_PLACE) != 1:
        raise ConfigError(f"{checkpoint}: its chat template does not keep the text as it is; --no-chat leaves it out")
    return before, after


def _has_template(checkpoint: Path) -> bool:
    if (checkpoint / "chat_template.jinja").is_file():
        return True
    try:
        content = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and bool(content.get("chat_template"))
