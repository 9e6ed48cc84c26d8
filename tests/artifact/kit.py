"""A small artifact, children that may be killed, and faults at the n-th operating system call."""

import os
import signal
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from redknot.artifact.certificate import Certificate, CertificateDraft
from redknot.artifact.files import read_sections_table
from redknot.artifact.identity import ModelIdentity, TokenIds, token_hash
from redknot.artifact.loaded import LoadedArtifact
from redknot.artifact.publish import Publication
from redknot.artifact.rows import ArtifactRow, ArtifactState
from redknot.artifact.schema import CATALOGUE_FILE, generation_dir
from redknot.artifact.store import ArtifactStore

NAMESPACE = "tenant-a"
GEOMETRY = {"num_layers": 6, "rope": {"main": {"rope_theta": 10000.0}}, "compress_ratios": [0, 4, 32]}
TOKENS = list(range(40, 70))


def model(**changes: object) -> ModelIdentity:
    fields: dict = {
        "weights_hash": "w" * 64,
        "geometry": GEOMETRY,
        "dtype": "bfloat16",
        "tokenizer_hash": "t" * 64,
        "prompt_encoder": "1",
    }
    return ModelIdentity.of(**(fields | changes))


def draft(**changes: object) -> CertificateDraft:
    fields: dict = {"namespace": NAMESPACE, "model": model(), "needs": ("latents", "streams", "zl"), "layer_group": 3}
    return CertificateDraft(**(fields | changes))


def sections(fill: float | None = None, *, layers: int = 6, world: int = 1, rows: int = 30) -> dict[str, torch.Tensor]:
    """Every kind of section; random, or all elements equal to ``fill``."""
    made: dict[str, torch.Tensor] = {}

    def add(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        value = torch.randn(shape) if fill is None else torch.full(shape, fill)
        made[name] = value.to(dtype)

    for layer in range(layers):
        add(f"layers.{layer}.entries", (rows // 4, 16), torch.bfloat16)
        add(f"layers.{layer}.window", (rows, 16), torch.float32)
        for rank in range(world):
            add(f"layers.{layer}.zl.r{rank}of{world}", (rows, 8 // world), torch.bfloat16)
    add("boundary.streams", (rows, 64), torch.bfloat16)
    return made


def publish(
    store: ArtifactStore,
    draft: CertificateDraft,
    sections: Mapping[str, torch.Tensor],
    token_ids: TokenIds,
    names: Sequence[str] = (),
) -> Certificate:
    """Publish one document, as a build of one does."""
    return store.publish_many([Publication(draft, sections, token_ids, names)])[0]


def run_child(work: Callable[[], object]) -> int:
    """Run ``work`` in a forked child (torch is already imported) and return its wait status."""
    return os.waitpid(start_child(work), 0)[1]


def start_child(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001  the child must never return into pytest
            os._exit(1)
        os._exit(0)
    return pid


OS_CALLS = ("open", "mkdir", "writev", "fsync", "rename", "unlink")


class Steps:
    """Counts the calls that change the disk and acts before the n-th, counted from 0."""

    def __init__(self, act_at: int | None, act: Callable[[str], None]) -> None:
        self.count = 0
        self._act_at = act_at
        self._act = act

    def step(self, what: str) -> None:
        at, self.count = self.count, self.count + 1
        if at == self._act_at:
            self._act(what)

    def install(self, patch: pytest.MonkeyPatch, calls: tuple[str, ...] = OS_CALLS) -> None:
        for name in calls:
            real = getattr(os, name)

            def call(*args: object, _name: str = name, _real: Callable = real, **kwargs: object) -> object:
                self.step(_name)
                return _real(*args, **kwargs)

            patch.setattr(os, name, call)


def kill_self(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def directory_of(store: ArtifactStore, certificate: Certificate) -> Path:
    return generation_dir(store.root, certificate.artifact_id, certificate.generation)


def read_sections(artifact: LoadedArtifact) -> dict[str, torch.Tensor]:
    return {name: artifact.section(name) for name in artifact.certificate.sections}


def read_all(store: ArtifactStore, certificate: Certificate) -> dict[str, torch.Tensor]:
    return read_sections(store.load(certificate.artifact_id, NAMESPACE))


def find(
    store: ArtifactStore,
    namespace: str = NAMESPACE,
    *,
    token_ids: TokenIds | None = None,
    name: str | None = None,
    model: ModelIdentity | None = None,
) -> tuple[ArtifactRow, ...]:
    """The artifacts in service that match everything given, oldest first."""
    rows = store.catalogue.rows(
        namespace,
        token_hash=None if token_ids is None else token_hash(token_ids),
        name=name,
        model=None if model is None else model.digest,
    )
    return tuple(row for row in rows if row.state is ArtifactState.READY)


def flip(path: Path, at: int) -> None:
    before = path.stat()
    with open(path, "r+b") as handle:
        handle.seek(at)
        byte = handle.read(1)[0]
        handle.seek(at)
        handle.write(bytes([byte ^ 0x10]))
    # A disk that rots does not touch the times.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def offset_of(path: Path, name: str) -> int:
    """Where the last byte of a tensor lies in its file."""
    tensor = read_sections_table(path)[name]
    return tensor.start + tensor.nbytes - 1


# What may become of the stored token ids of one artifact; None: they are gone.
TOKEN_DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "cut inside an id": lambda ids: ids[:-1],
    "an id less": lambda ids: ids[:-4],
    "an id more": lambda ids: ids + ids[:4],
    "one id": lambda ids: bytes([ids[0] ^ 1]) + ids[1:],
    "a sign": lambda ids: ids[:3] + b"\x80" + ids[4:],
    "zeros": lambda ids: bytes(len(ids)),
    "empty": lambda ids: b"",
    "gone": lambda ids: None,
}


def alter_tokens(root: Path, artifact_id: str, change: Callable[[bytes], bytes | None]) -> None:
    """Change an artifact's token ids in the catalogue as a disk that rots does: no revision tells of it."""
    with sqlite3.connect(root / CATALOGUE_FILE) as connection:
        [(ids,)] = connection.execute("SELECT ids FROM tokens WHERE artifact_id = ?", (artifact_id,)).fetchall()
        changed = change(ids)
        if changed is None:
            connection.execute("DELETE FROM tokens WHERE artifact_id = ?", (artifact_id,))
        else:
            connection.execute("UPDATE tokens SET ids = ? WHERE artifact_id = ?", (changed, artifact_id))
    connection.close()
