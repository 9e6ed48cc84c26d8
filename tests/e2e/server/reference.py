"""What ``transformers`` says to fifty prompts, computed once; and to any other prompt, when it is asked.

``python -m tests.e2e.server.reference`` writes ``greedy.json`` again, for another nano.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.kit.requests import BOS, document
from tests.kit.server import NANO, TIE

LENGTH = 10  # tokens of an answer
FILE = Path(__file__).with_name("greedy.json")


def prompts() -> list[list[int]]:
    """Fifty, of 1 to 600 tokens: around every multiple that V4 counts in, and others."""
    edges = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 130, 159, 160, 161]
    draw = random.Random(0)
    lengths = [*edges, 255, 256, 257, 511, 512, 513, 600, *(draw.randint(10, 300) for _ in range(16))]
    return [[BOS, *document(length - 1, 100 + number)] for number, length in enumerate(lengths)]


def checkpoint_hash() -> str:
    """Of the weights that the file was made with."""
    return hashlib.sha256((NANO / "model.safetensors").read_bytes()).hexdigest()


@dataclass
class Reference:
    """transformers' model of nano, and what it was asked; rows it excuses are counted."""

    tokens: int = 0
    ties: int = 0
    _rows: dict[tuple[int, ...], list[tuple[int, float]]] = field(default_factory=dict)
    _model: Any = None

    @property
    def model(self) -> Any:
        """float32, eager attention."""
        if self._model is None:
            from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM

            loaded = DeepseekV4ForCausalLM.from_pretrained(NANO, dtype=torch.float32, attn_implementation="eager")
            self._model = loaded.eval()
        return self._model

    def wrong(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Places of an answer where transformers would have gone on otherwise, ties left out.

        A greedy answer is right if each token is the best one behind those in front of it; so it is checked to its
        end even where a tie was decided the other way.
        """
        places = []
        for place, (token, (best, margin)) in enumerate(zip(answer, self._best(prompt, answer), strict=True)):
            self.tokens += 1
            if token != best and margin < TIE:
                self.ties += 1
            elif token != best:
                places.append(place)
        return places

    def greedy(self, prompt: Sequence[int], length: int) -> tuple[list[int], list[float]]:
        """A greedy answer, and by how much each of its tokens was the best one."""
        from transformers import DynamicCache

        cache, ids, answer, margins = DynamicCache(config=self.model.config), list(prompt), [], []
        with torch.inference_mode():
            while len(answer) < length:
                logits = self.model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1].float()
                top = logits.topk(2)
                answer.append(int(top.indices[0]))
                margins.append(float(top.values[0] - top.values[1]))
                ids = answer[-1:]
        return answer, margins

    def _best(self, prompt: Sequence[int], answer: Sequence[int]) -> list[tuple[int, float]]:
        key = (*prompt, *answer)
        if key not in self._rows:
            with torch.inference_mode():
                logits = self.model(torch.tensor([key[:-1]])).logits[0, len(prompt) - 1 :].float()
            top = logits.topk(2)
            margins = (top.values[:, 0] - top.values[:, 1]).tolist()
            self._rows[key] = list(zip(top.indices[:, 0].tolist(), margins, strict=True))
        return self._rows[key]


def _main() -> None:
    reference, answers = Reference(), []
    for prompt in prompts():
        answer, margins = reference.greedy(prompt, LENGTH)
        answers.append({"answer": answer, "margins": [float(f"{margin:.3g}") for margin in margins]})
    lines = ",\n".join(json.dumps(one) for one in answers)
    FILE.write_text(f'{{"weights": "{checkpoint_hash()}", "answers": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    _main()
