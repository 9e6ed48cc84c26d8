"""Train nano: ``python -m redknot.nano.train --out DIR`` (resumes from DIR; Ctrl-C and kill lose one save interval).

Muon (lr 0.02) for matrices, Adam (lr 3e-3) for the rest. Phases run in order; each has a mixture of sequences, a
subset of the layers and an accuracy that ends it early.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from redknot.model.weights import build_model
from redknot.nano.curriculum import ALL, CORE, Phase, curriculum
from redknot.nano.differentiable import IndexerTrace, forward
from redknot.nano.parameters import (
    GEOMETRY,
    Parameters,
    initial_tensors,
    load_tensors,
    save_checkpoint,
    subset_geometry,
)


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether Muon trains it: hidden matrices, not embeddings, router gates or hyper-connections."""
    excluded = ("embed.", "head.", ".gate.", "hc_", ".ape")
    return value.dim() == 2 and not any(part in name for part in excluded)


def is_indexer(name: str) -> bool:
    """Whether a parameter belongs to a lightning indexer."""
    return ".indexer." in name


class Trainer:
    """Parameters, optimizer state and progress, all of it on disk under ``out``."""

    def __init__(self, out: Path, seed: int, start: Path | None = None, phase: int = 0) -> None:
        self.out = out
        self.progress: dict[str, Any] = {"phase": 0, "step": 0, "total": 0, "tokens": 0, "accuracy": 0.0, "seed": seed}
        if (out / "progress.json").exists():
            self.progress = json.loads((out / "progress.json").read_text(encoding="utf-8"))
            state = load_file(out / "state.safetensors")
        elif start is not None:
            state = {f"p/{k}": v for k, v in load_tensors(start).items()}
            self.progress |= {"phase": phase, "ran": list(ALL)}
        else:
            state = {f"p/{k}": v for k, v in initial_tensors(torch.Generator().manual_seed(seed)).items()}
        # In one order, fresh or resumed: gradient norms are sums over the parameters.
        self.tensors = {key[2:]: state[key] for key in sorted(state) if key.startswith("p/")}
        self.moments = {key: value for key, value in state.items() if not key.startswith("p/")}

    def optimizers(self, names: list[str], phase: Phase) -> list[torch.optim.Optimizer]:
        """Muon and Adam over the leaves that a phase trains, with the moments of the run so far."""
        self.leaves = {
            name: self.tensors[name]
            for name in names
            if self.tensors[name].is_floating_point() and not name.endswith("gate.bias")
        }
        chosen = {name: leaf for name, leaf in self.leaves.items() if is_indexer(name) == phase.distil or phase.topk}
        for name, leaf in self.tensors.items():
            if leaf.is_floating_point():
                leaf.requires_grad_(name in chosen)
        matrices = [leaf for name, leaf in chosen.items() if is_matrix(name, leaf)]
        rest = [leaf for name, leaf in chosen.items() if not is_matrix(name, leaf)]
        muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0, momentum=0.95)
        adam = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
        for name, leaf in chosen.items():
            optimizer: torch.optim.Optimizer = muon if is_matrix(name, leaf) else adam
            kept = {key.split("/", 2)[2]: v for key, v in self.moments.items() if key.startswith(f"m/{name}/")}
            if kept:
                optimizer.state[leaf] = dict(kept)
        return [muon, adam]

    def _join(self, layers: tuple[int, ...]) -> None:
        """Make layers that run for the first time start as the identity: their output projections become zero."""
        ran = self.progress.setdefault("ran", list(CORE))
        for layer in sorted(set(layers) - set(ran)):
            for name, leaf in self.tensors.items():
                if name.startswith(f"layers.{layer}.") and (".wo_b." in name or ".w2." in name):
                    leaf.detach().zero_()
        self.progress["ran"] = sorted({*ran, *layers})

    def save(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Write the state aside and rename it, parameters and moments in one file."""
        names = {id(leaf): name for name, leaf in self.tensors.items()}
        for optimizer in optimizers:
            for leaf, moments in optimizer.state.items():
                for key, value in moments.items():
                    self.moments[f"m/{names[id(leaf)]}/{key}"] = torch.as_tensor(value)
        state = {f"p/{name}": leaf.detach().contiguous() for name, leaf in self.tensors.items()}
        save_file(state | {k: v.contiguous() for k, v in self.moments.items()}, self.out / "state.tmp")
        (self.out / "state.tmp").replace(self.out / "state.safetensors")
        (self.out / "progress.tmp").write_text(json.dumps(self.progress), encoding="utf-8")
        (self.out / "progress.tmp").replace(self.out / "progress.json")

    def run(self, phase: Phase, save_every: float) -> None:
        """Train one phase to its accuracy or its last step."""
        self._join(phase.layers)
        view = Parameters(self.tensors, phase.layers)
        optimizers = self.optimizers(view.names(), phase)
        geometry, progress = subset_geometry(phase.layers), self.progress
        saved = started = time.monotonic()
        while progress["step"] < phase.max_steps and progress["accuracy"] < phase.until:
            rng = np.random.default_rng([progress["seed"], progress["total"]])
            ids, weights = draw_batch(rng, phase)
            for optimizer in optimizers:
                base = 0.02 if isinstance(optimizer, torch.optim.Muon) else 3e-3
                for group in optimizer.param_groups:
                    group["lr"] = base * phase.lr_scale * schedule(progress["step"], phase)
                optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                model = build_model(view, geometry)
                loss, accuracy = batch_loss(model, geometry, ids, weights, phase)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for o in optimizers for g in o.param_groups for p in g["params"]], 1.0)
            for optimizer in optimizers:
                optimizer.step()
            progress["step"] += 1
            progress["total"] += 1
            progress["tokens"] += ids.numel()
            progress["accuracy"] += 0.05 * (accuracy - progress["accuracy"])
            if progress["step"] % 10 == 0:
                rate = 10 * ids.numel() / (time.monotonic() - started)
                started = time.monotonic()
                print(
                    f"{phase.name} step {progress['step']}/{phase.max_steps} loss {loss.item():.4f} "
                    f"accuracy {progress['accuracy']:.3f} {rate:.0f} tokens/s total {progress['tokens']}",
                    flush=True,
                )
            if time.monotonic() - saved > save_every:
                self.save(optimizers)
                saved = time.monotonic()
        progress.update(phase=progress["phase"] + 1, step=0, accuracy=0.0)
        self.save(optimizers)


def schedule(step: int, phase: Phase) -> float:
    """Warm-up over 20 steps, times a linear decay over the phase."""
    return min(1.0, (step + 1) / 20) * (1.0 - (1.0 - phase.lr_left) * step / phase.max_steps)


def draw_batch(rng: Generator, phase: Phase) -> tuple[Tensor, Tensor]:
    """Token ids [B, S] and loss weights [B, S] of the tokens as targets."""
    shares = np.array([share for share, _ in phase.mixture])
    rows = []
    for _ in range(phase.batch):
        maker = phase.mixture[rng.choice(len(shares), p=shares / shares.sum())][1]
        rows.append(maker(rng, phase.n_tokens))
    ids = torch.from_numpy(np.stack([np.asarray(row[0], dtype=np.int64) for row in rows]))
    return ids, torch.from_numpy(np.stack([np.asarray(row[1], dtype=np.float32) for row in rows]))


def batch_loss(model: Any, geometry: Any, ids: Tensor, weights: Tensor, phase: Phase) -> tuple[Tensor, float]:
    """Weighted next-token loss (or the distillation loss) and the accuracy on fully weighted targets."""
    targets, weight = ids[:, 1:].flatten(), weights[:, 1:].flatten()
    rows = (torch.arange(ids.numel()).view_as(ids)[:, :-1]).flatten()[weight > 0]
    targets, weight = targets[weight > 0], weight[weight > 0]
    logits, traces = forward(
        model, geometry, ids, topk=phase.topk, trace=phase.distil or bool(phase.topk), frozen=phase.distil, rows=rows
    )
    answers = weight == 1
    accuracy = (logits[answers].argmax(-1) == targets[answers]).float().mean().item()
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    loss = mean_of_sequences(losses, weight, weights[:, 1:].nonzero()[:, 0])
    distilled = sum((distillation_loss(trace) for trace in traces), torch.zeros(()))
    if phase.distil:
        return distilled, accuracy
    return loss + 0.1 * distilled, accuracy


def mean_of_sequences(losses: Tensor, weights: Tensor, sequences: Tensor) -> Tensor:
    """The mean over sequences of each one's weighted mean: [M] losses, weights and the sequence of each, a scalar.

    An answer in two steps has five times the tokens of a value; sequences of the one kind would drown the other's.
    """
    count = int(sequences.max()) + 1
    each = torch.zeros(count).index_add(0, sequences, losses * weights)
    return (each / torch.zeros(count).index_add(0, sequences, weights)).mean()


def distillation_loss(trace: IndexerTrace) -> Tensor:
    """Cross-entropy of the indexer's scores against the attention that entries receive over all heads."""
    rows = trace.visible.sum(-1) > GEOMETRY.index_topk // 4
    target = trace.attention[:, rows]
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    scores = trace.scores[:, rows].float().masked_fill(~trace.visible[rows], -1e4)
    return -(target * scores.log_softmax(-1)).sum(-1).mean()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the resumable state and the model files")
    parser.add_argument("--tokenizer", type=Path, default=Path("models/nano/tokenizer.json"))
    parser.add_argument("--start", type=Path, help="model folder to train on from")
    parser.add_argument("--phase", help="phase that --start begins with; by default the last one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between saves")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    phases = curriculum(Tokenizer.from_file(str(arguments.tokenizer)))
    names = [phase.name for phase in phases]
    if arguments.phase not in (None, *names):
        parser.error(f"--phase must be one of {', '.join(names)}")
    first = names.index(arguments.phase) if arguments.phase else len(phases) - 1
    trainer = Trainer(arguments.out, arguments.seed, arguments.start, first)
    while trainer.progress["phase"] < len(phases):
        trainer.run(phases[trainer.progress["phase"]], arguments.save_every)
        save_checkpoint(trainer.tensors, arguments.out / "model")


if __name__ == "__main__":
    main()
