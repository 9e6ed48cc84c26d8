"""A checkpoint's ``tokenizer.json`` as the rest of RedKnot uses it: text to ids without specials, and back.

Text never becomes a control token: whatever the file lists as added tokens ("<|bos|>", role markers) is encoded as
plain text when it is written out in a document or a question.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer as Inner

from redknot.errors import CheckpointError, InputError
from redknot.model.geometry import Geometry, load_geometry

TOKENIZER_FILE = "tokenizer.json"
_ORDINARY = 8  # characters a token that only unusual texts exceed
_PIECE = 65536  # characters that are counted at once
_MARGIN = 8


class Tokenizer:
    """Encodes and decodes text of one checkpoint; safe to use from several threads."""

    def __init__(self, inner: Inner, geometry: Geometry, file_hash: str) -> None:
        self.file_hash = file_hash  # hex SHA-256 of tokenizer.json
        self.bos_id = geometry.bos_token_id
        self.eos_ids = geometry.eos_token_ids
        self._inner = inner
        self._vocab_size = geometry.vocab_size
        self._added = {int(index): str(token.content) for index, token in inner.get_added_tokens_decoder().items()}
        control = {index for index in (self.bos_id, *self.eos_ids) if index is not None} | self._added.keys()
        self._control = np.array(sorted(control), dtype=np.int64)

    def encode(self, text: str) -> npt.NDArray[np.int64]:
        """Ids of a text, [n], no special token added or made; InputError when it cannot be encoded so."""
        try:
            ids = np.array(self._inner.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        except TypeError:
            raise InputError("text holds a lone surrogate, which no UTF-8 file can hold") from None
        if len(ids) and int(ids.max()) >= self._vocab_size:
            raise InputError(f"text encodes to token {int(ids.max())}, the model has {self._vocab_size}")
        control = ids[np.isin(ids, self._control)]
        if len(control):
            name = self._added.get(int(control[0]), "")
            raise InputError(f"text encodes to the control token {int(control[0])} {name!r}")
        return ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether a text has more than ``limit`` tokens, as far as that shows without encoding all of it at once.

        An encoding takes memory and time a hundred times its text. A text of more than ``_ORDINARY`` characters for
        each token allowed is therefore counted in pieces, which ends soon if it is too long. A cut changes few tokens
        beside it; one part in ``_MARGIN`` more than the limit is beyond what all cuts can do. False decides nothing.
        """
        if len(text) <= _ORDINARY * limit:
            return False
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._inner.encode(text[start : start + _PIECE], add_special_tokens=False).ids)
            if count > limit + limit // _MARGIN:
                return True
        return False

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids, control tokens written out."""
        return str(self._inner.decode([int(index) for index in ids], skip_special_tokens=False))


def tokenizer_hash(checkpoint: Path) -> str:
    """Hex SHA-256 of a checkpoint's ``tokenizer.json``; CheckpointError when it cannot be read."""
    return hashlib.sha256(_read(checkpoint)).hexdigest()


def load_tokenizer(checkpoint: Path, geometry: Geometry | None = None) -> Tokenizer:
    """The tokenizer of a checkpoint folder; ``geometry`` saves reading ``config.json`` again.

    CheckpointError when ``tokenizer.json`` is missing or not a tokenizer.
    """
    data = _read(checkpoint)
    try:
        inner = Inner.from_str(_all_control(data))
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for every malformed file
        raise CheckpointError(f"{checkpoint / TOKENIZER_FILE}: not a tokenizer ({error})") from None
    # A file may have been saved with the settings of one use; ids must be the text's, all of them and no others.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    return Tokenizer(inner, geometry or load_geometry(checkpoint), hashlib.sha256(data).hexdigest())


def _all_control(data: bytes) -> str:
    """The file with every added token marked special: role markers often are not, and text must not make them."""
    text = data.decode("utf-8")
    content: Any = json.loads(text)
    added = content.get("added_tokens") or []
    if all(token["special"] for token in added):
        return text
    for token in added:
        token["special"] = True
    return json.dumps(content, ensure_ascii=False)


def _read(checkpoint: Path) -> bytes:
    path = checkpoint / TOKENIZER_FILE
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{checkpoint}: no {TOKENIZER_FILE}; copy it from the published checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: not readable ({error.strerror or error})") from None
