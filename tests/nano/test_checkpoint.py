"""The committed checkpoint: small enough, of the documented geometry, and it answers questions it has never seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from redknot.nano.parameters import CONFIG
from redknot.nano.samples import Sample, make_sample, sample_ids
from redknot.runtime.engine import Engine
from tests.nano.kit import swap_latest

NANO = Path("models/nano")
# task, tokens, documents, questions, right at least
RIGHT = [("single", 600, 4, 12, 10), ("single", 2048, 6, 6, 5), ("owner", 1024, 6, 12, 10), ("about", 1024, 6, 12, 10)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(NANO)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def test_files() -> None:
    assert json.loads((NANO / "config.json").read_text()) == CONFIG
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 16 * 2**20


def answers(engine: Engine, tokenizer: Tokenizer, sample: Sample) -> bool:
    *segments, answer = sample_ids(tokenizer, sample)
    ids = [token for segment in segments for token in segment]
    return list(engine.generate(token_ids=ids, max_new_tokens=len(answer)).token_ids) == answer


@pytest.mark.parametrize(("task", "tokens", "documents", "n", "least"), RIGHT)
def test_it_answers_questions_about_new_names(
    engine: Engine, tokenizer: Tokenizer, task: str, tokens: int, documents: int, n: int, least: int
) -> None:
    """Chance is below 1 in 10,000 a question."""
    rng = np.random.default_rng(3)
    right = [answers(engine, tokenizer, make_sample(rng, tokenizer, task, "test", tokens, documents)) for _ in range(n)]
    assert sum(right) >= least


def test_swapping_two_documents_swaps_the_answer(engine: Engine, tokenizer: Tokenizer) -> None:
    """Both orders right: the later document decided, not a liking for one of the values."""
    rng = np.random.default_rng(4)
    right = 0
    for _ in range(8):
        sample = make_sample(rng, tokenizer, "latest", "test", 600, 4)
        swapped = swap_latest(sample)
        assert swapped.questions != sample.questions
        right += answers(engine, tokenizer, sample) and answers(engine, tokenizer, swapped)
    assert right >= 5  # guessing between the two values gets 2
