"""The committed checkpoint: small enough, of the documented geometry, and it answers questions it has never seen."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from redknot.model.checkpoint import load_model
from redknot.nano.evaluate import NO_DOCUMENTS, SEGMENT_GROUPED, answer_dense, divergence, main
from redknot.nano.parameters import CONFIG
from redknot.nano.samples import make_sample, sample_ids
from redknot.runtime.model import Model
from tests.nano.kit import swap_latest

NANO = Path("models/nano")


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(*load_model(NANO))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(NANO / "tokenizer.json"))


def test_files() -> None:
    assert json.loads((NANO / "config.json").read_text()) == CONFIG
    assert sum(path.stat().st_size for path in NANO.iterdir()) <= 16 * 2**20


def answers(model: Model, tokenizer: Tokenizer, sample: object) -> bool:
    *segments, answer = [torch.tensor(ids) for ids in sample_ids(tokenizer, sample)]  # type: ignore[arg-type]
    return answer_dense(model, torch.cat(segments), len(answer)).tokens == answer.tolist()


def test_it_answers_questions_about_new_names(model: Model, tokenizer: Tokenizer) -> None:
    """Chance is below 1 in 10,000 a question."""
    rng = np.random.default_rng(3)
    right = [answers(model, tokenizer, make_sample(rng, tokenizer, "single", "test", 600, 4)) for _ in range(12)]
    assert sum(right) >= 10
    far = [answers(model, tokenizer, make_sample(rng, tokenizer, "single", "test", 2048, 6)) for _ in range(6)]
    assert sum(far) >= 5


def test_swapping_two_documents_swaps_the_answer(model: Model, tokenizer: Tokenizer) -> None:
    """Both orders right: the later document decided, not a liking for one of the values."""
    rng = np.random.default_rng(4)
    right = 0
    for _ in range(8):
        sample = make_sample(rng, tokenizer, "latest", "test", 600, 4)
        swapped = swap_latest(sample)
        assert swapped.questions != sample.questions
        right += answers(model, tokenizer, sample) and answers(model, tokenizer, swapped)
    assert right >= 5  # guessing between the two values gets 2


def test_evaluation_counts_every_arm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.jsonl"
    words = ["--n", "3", "--tasks", "single", "--tokens", "200", "260", "--documents", "2", "3", "--out", str(out)]
    arms = ["recompute", NO_DOCUMENTS, SEGMENT_GROUPED, "rowsparse", "turbo", "configs/profiles/plain.json"]
    monkeypatch.setattr("sys.argv", ["evaluate", "--model", str(NANO), "--arms", *arms, *words])
    main()
    rows = {row["arm"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert list(rows) == arms
    assert rows[NO_DOCUMENTS]["right"] == 0
    assert rows["recompute"]["right"] >= 2
    for row in rows.values():
        assert (row["n"], row["task"]) == (3, "single")
        assert row["low"] <= row["accuracy"] == row["right"] / 3 <= row["high"]
    assert rows["recompute"]["kl"] == 0.0
    assert rows["recompute"]["top1_agreement"] == 1.0
    # Counting groups per document changes little; nothing to read changes everything.
    assert 0.0 < rows[SEGMENT_GROUPED]["kl"] < 0.5 < rows[NO_DOCUMENTS]["kl"]


def test_divergence_is_that_of_the_definition() -> None:
    """KL of (3/4, 1/4) against (1/2, 1/2), whatever constant is added to the logits."""
    one, half = torch.tensor([0.75, 0.25]).log() + 3, torch.zeros(2)
    expected = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert divergence(one, half) == pytest.approx(expected, abs=1e-6)
    assert divergence(one, one) == 0.0
