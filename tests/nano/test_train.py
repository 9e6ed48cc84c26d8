"""The trainer: a run that was cut and resumed ends where an uncut one does; phases end; layers join as identities."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.random import Generator
from safetensors.torch import load_file

from redknot.nano import train
from redknot.nano.curriculum import ALL, CORE, Phase
from redknot.nano.sequences import induction_sequence
from redknot.nano.tokenizer import FIRST_WORD_ID
from redknot.nano.train import Trainer, schedule


def small(rng: Generator, n_tokens: int) -> tuple[Any, Any]:
    return induction_sequence(rng, FIRST_WORD_ID + 64, n_tokens)


def phase(**changes: Any) -> Phase:
    return Phase(**{"name": "p", "layers": CORE, "n_tokens": 64, "batch": 2, "max_steps": 4, "until": 2.0} | changes)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Sums are made in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "state.safetensors")


def test_a_cut_run_ends_where_an_uncut_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by Ctrl-C after two of four steps; weights, moments and progress are equal afterwards."""
    mixture = ((1.0, small),)
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    Trainer(tmp_path / "whole", 5).run(phase(mixture=mixture), 1e9)
    native, drawn = train.draw_batch, []

    def draw(rng: Generator, current: Phase) -> Any:
        drawn.append(1)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return native(rng, current)

    monkeypatch.setattr(train, "draw_batch", draw)
    with pytest.raises(KeyboardInterrupt):
        Trainer(tmp_path / "cut", 5).run(phase(mixture=mixture), 0.0)
    assert json.loads((tmp_path / "cut" / "progress.json").read_text())["step"] == 2
    Trainer(tmp_path / "cut", 5).run(phase(mixture=mixture), 0.0)
    whole, resumed = state(tmp_path / "whole"), state(tmp_path / "cut")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    progress = [json.loads((tmp_path / name / "progress.json").read_text()) for name in ("whole", "cut")]
    assert progress[0] == progress[1]
    assert (progress[0]["phase"], progress[0]["step"], progress[0]["total"]) == (1, 0, 4)


def test_steps_change_what_they_train_and_nothing_else(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5)
    before = {name: value.clone() for name, value in trainer.tensors.items()}
    trainer.run(phase(mixture=((1.0, small),)), 1e9)
    changed = {name for name, value in trainer.tensors.items() if not torch.equal(value, before[name])}
    assert "embed.weight" in changed
    assert any(name.startswith("layers.3.attn.") for name in changed)
    assert not any(name.startswith("layers.2.") or ".indexer." in name for name in changed)


def test_distilling_trains_indexers_alone(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5)
    trainer.run(phase(layers=ALL, max_steps=1, mixture=((1.0, small),)), 1e9)
    before = {name: value.clone() for name, value in trainer.tensors.items()}
    trainer.run(phase(layers=ALL, n_tokens=128, max_steps=2, mixture=((1.0, small),), distil=True), 1e9)
    changed = {name for name, value in trainer.tensors.items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".indexer." in name for name in changed)


def test_a_phase_ends_at_its_accuracy(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, 5)
    trainer.run(phase(until=0.0, mixture=((1.0, small),)), 1e9)
    assert (trainer.progress["phase"], trainer.progress["total"]) == (1, 0)


def test_each_sequence_counts_alike() -> None:
    """(1 * 2 + 0.5 * 4) / 1.5 of the first, 3 of the second, however many tokens each has."""
    losses, weights = torch.tensor([2.0, 4.0, 3.0, 3.0, 3.0]), torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0])
    found = train.mean_of_sequences(losses, weights, torch.tensor([0, 0, 1, 1, 1]))
    assert found.item() == pytest.approx((4 / 1.5 + 3) / 2)


def test_learning_rate() -> None:
    one = phase(max_steps=100, lr_left=0.2, mixture=())
    assert schedule(0, one) == pytest.approx(1 / 20)
    assert schedule(50, one) == pytest.approx(0.6)
    assert schedule(99, one) == pytest.approx(0.208)
