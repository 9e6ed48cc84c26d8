"""From an item to the token ids that every arm gets."""

from __future__ import annotations

from pathlib import Path

from eval.chat import Chat, load_chat
from eval.encoded import Encoded, encoded
from eval.items import Item
from redknot.model.geometry import load_geometry
from redknot.model.tokenizer import Tokenizer, load_tokenizer


class Encoder:
    """A checkpoint's tokenizer, the form it gives to chats, and how long a prompt may be."""

    def __init__(self, tokenizer: Tokenizer, chat: Chat | None, max_positions: int) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.max_positions = max_positions

    @classmethod
    def load(cls, checkpoint: Path, chat: bool = True) -> Encoder:
        """Of a checkpoint folder; without ``chat`` no prompt is wrapped. CheckpointError, ConfigError."""
        geometry = load_geometry(checkpoint)
        tokenizer = load_tokenizer(checkpoint, geometry)
        form = load_chat(checkpoint, tokenizer.bos_id) if chat else None
        return cls(tokenizer, form, geometry.max_positions)

    def encode(self, item: Item) -> Encoded:
        """Ids of an item: BOS once, then the parts, each tokenised alone, so that documents end where they end."""
        return self._framed(item, item.parts)

    def question(self, item: Item) -> Encoded:
        """Ids of an item without its documents."""
        return self._framed(item, tuple(part for part in item.parts if not part[1]))

    def _framed(self, item: Item, parts: tuple[tuple[str, bool], ...]) -> Encoded:
        bos = () if self.tokenizer.bos_id is None else (self.tokenizer.bos_id,)
        chat = self.chat if item.chat and self.chat is not None else Chat((), ())
        body = [(self.tokenizer.encode(text), is_document) for text, is_document in parts]
        return encoded([((*bos, *chat.before), False), *body, (chat.after, False)])
