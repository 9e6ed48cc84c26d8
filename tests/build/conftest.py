"""One small checkpoint for all builder tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from redknot.artifact.certificate import CertificateDraft
from redknot.build.target import Target, make_target
from redknot.model.checkpoint import load_model
from redknot.model.profile import SHIPPED
from redknot.model.tokenizer import Tokenizer, load_tokenizer
from redknot.runtime.identity import model_identity
from redknot.runtime.model import Model
from tests.kit.corpus import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture(scope="session")
def model(checkpoint: Path) -> Model:
    return Model(*load_model(checkpoint))


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return load_tokenizer(checkpoint)


@pytest.fixture(scope="session")
def target(model: Model) -> Target:
    return make_target(model.geometry, [SHIPPED["combined"], SHIPPED["turbo"]], 2, "tenant")


@pytest.fixture(scope="session")
def draft(target: Target, checkpoint: Path, model: Model, tmp_path_factory: pytest.TempPathFactory) -> CertificateDraft:
    import torch

    cache = tmp_path_factory.mktemp("cache")
    return target.draft(model_identity(checkpoint, model.geometry, torch.float32, cache))
