"""The evaluation's engine over a server: one that runs already, or one that is started here and stopped in the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from eval.arms import Arm
from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.engines.launched import Launched
from eval.engines.server import Server
from eval.engines.wishes import Wishes, check_profiles, check_servable, named_files
from eval.provenance import checkpoint_identity
from redknot.artifact.store import ArtifactStore
from redknot.build.plan import is_store
from redknot.errors import ConfigError


def open_server(url: str | None, model: Path, store: Path, arms: Mapping[str, Arm], tp: int) -> SglangEngine:
    """An engine over the server at ``url``, or with None over one that is started with all that the arms need.

    ConfigError when it has another checkpoint, number of ranks or profile; ServerError when it does not answer.
    """
    with ExitStack() as opened:
        launched = None if url is not None else opened.enter_context(launch(model, store, arms, tp))
        engine = SglangEngine(url if launched is None else launched.url, model, arms, tp, launched)
        opened.pop_all()
        return engine


def launch(model: Path, store: Path, arms: Mapping[str, Arm], tp: int) -> Launched:
    """A server, to be entered, over a store (an empty one where there is none) whose requests may name every arm."""
    check_servable(arms)
    if not is_store(store):
        ArtifactStore(store, create=True).close()
    return Launched(model, store, ["--tp-size", str(tp)], named_files(arms))


class SglangEngine:
    """One request at a time; no request finds in the prefix cache what another left, but those of the prefix arm."""

    name = "sglang"

    def __init__(self, url: str, model: Path, arms: Mapping[str, Arm], tp: int, launched: Launched | None) -> None:
        self._server = Server(url)
        self._launched = launched
        self._arms = arms
        self._wishes = Wishes(arms)
        self.tp = tp
        self._checkpoint, version = check_server(self._server, model, arms, tp)
        self.versions: Mapping[str, str] = {"sglang": version}
        self._begin()

    def answer(self, arm: str, prompt: Encoded, max_new_tokens: int) -> Reply:
        """Answer in one arm; ServerError when the server refuses, fails, or answers something else."""
        request = self._wishes.request(arm, prompt, max_new_tokens)
        return self._wishes.reply(arm, self._server.ask(request).reply(self._checkpoint))

    def forget(self, arm: str) -> None:
        """Start the server again: it forgets what all arms keep. ConfigError for a server that runs on."""
        if self._launched is None:
            raise ConfigError(
                f"{self._server.url} keeps the documents that it has read; cold times need a server that is started "
                "here, --engine sglang"
            )
        self._server.close()
        self._launched.stop()
        self._launched.start()
        self._server = Server(self._launched.url)
        self._begin()

    def close(self) -> None:
        """Stop the server, if it was started here."""
        self._server.close()
        if self._launched is not None:
            self._launched.stop()

    def _begin(self) -> None:
        """A token through every arm, so that the catalogue has been read; no prefix is known yet."""
        self._wishes.begin()
        for arm in self._arms:
            self._server.ask(self._wishes.request(arm, Encoded(np.zeros(1, np.int32), ()), 1)).reply("")
        self._wishes.begin()


def check_server(server: Server, model: Path, arms: Mapping[str, Arm], tp: int) -> tuple[str, str]:
    """The digest of the server's checkpoint, and its SGLang version; ConfigError when it is not what is evaluated."""
    found, expected = server.describe(), checkpoint_identity(model).digest
    if found.checkpoint is None:
        raise ConfigError(f"{server.url} cannot use its store {found.store}; its log says why")
    if found.checkpoint != expected:
        raise ConfigError(
            f"{server.url} serves checkpoint {found.checkpoint[:12]}, and {model} is {expected[:12]}; give its --model"
        )
    if found.tp != tp:
        raise ConfigError(f"{server.url} has {found.tp} ranks; give --tp {found.tp}")
    check_profiles(server.url, found.profiles, arms)
    return found.checkpoint, found.version
