"""A small checkpoint with nano's tokenizer, and documents of exact token counts: what builder tests run on."""

from __future__ import annotations

import gzip
import json
import shutil
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from redknot.nano import parameters
from redknot.nano.statements import lexicon
from redknot.nano.text import document_ids
from redknot.nano.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MAX_POSITIONS = 600
LAYERS = (0, 2, 3, 5)  # of nano: sliding, HCA and two CSA layers


@lru_cache(maxsize=1)
def nano_tokenizer() -> Tokenizer:
    return build_tokenizer()


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Four of nano's layers with random weights, at most MAX_POSITIONS tokens."""
    folder.mkdir(parents=True)
    tensors = parameters.initial_tensors(torch.Generator().manual_seed(seed))
    kept = {name: value.contiguous() for name, value in tensors.items() if not name.startswith("layers.")}
    for new, old in enumerate(LAYERS):
        prefix = f"layers.{old}."
        for name, value in tensors.items():
            if name.startswith(prefix):
                kept[f"layers.{new}.{name.removeprefix(prefix)}"] = value.contiguous()
    save_file(kept, folder / "model.safetensors")
    config = parameters.CONFIG | {"num_hidden_layers": len(LAYERS), "max_position_embeddings": MAX_POSITIONS}
    for key in ("layer_types", "mlp_layer_types"):
        config[key] = [parameters.CONFIG[key][layer] for layer in LAYERS]
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(ROOT / "models/nano/tokenizer.json", folder)
    return folder


def document(tokens: int, seed: int = 0) -> str:
    """A document of exactly that many tokens (12 or more)."""
    lex = lexicon(nano_tokenizer())
    return lex.text(document_ids(np.random.default_rng(seed), lex, tokens, []))


def write_lines(path: Path, records: list[object]) -> Path:
    """JSON lines, compressed where the name says so; a string is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    data = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


def write_corpus(folder: Path, lengths: list[int]) -> Path:
    """Text files d0.txt, d1.txt, ... of these token counts."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, length in enumerate(lengths):
        (folder / f"d{number}.txt").write_text(document(length, number))
    return folder
