"""A checkpoint whose tokenizer has V4's own control tokens, so that SGLang encodes its chats as V4's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_OTHERS = (
    *(USER, ASSISTANT, "<｜System｜>", "<｜latest_reminder｜>", "<｜deepseek_image｜>", "｜DSML｜"),
    *("<think>", "</think>"),
    *(f"<｜{task}｜>" for task in ("action", "query", "authority", "domain", "title", "read_url")),
)


def add_control_tokens(checkpoint: Path) -> None:
    """Give nano's three control tokens V4's names, and the last pieces of the vocabulary to the others."""
    path = checkpoint / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    ids = dict(zip((BOS, EOS, PAD), range(3), strict=True))
    ids |= {name: len(vocab) - len(_OTHERS) + number for number, name in enumerate(_OTHERS)}
    for name, number in ids.items():
        vocab[number] = [name, vocab[number][1] if number < 3 else -1e4]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] = [{"id": number, "content": name} | flags for name, number in sorted(ids.items(), key=_id)]
    text = json.dumps(content["post_processor"]).replace("<|bos|>", BOS)
    content["post_processor"] = json.loads(text)
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(options, ensure_ascii=False), encoding="utf-8")


def _id(item: tuple[str, int]) -> int:
    return item[1]
