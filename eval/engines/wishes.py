"""What a server must be asked for so that it runs an arm, and whether it can."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.arms import Arm
from eval.encoded import Encoded
from eval.engines.base import Reply
from eval.engines.wire import Request, ServerError, Stream
from eval.guard import objection
from eval.names import RECOMPUTE
from redknot.errors import ConfigError
from redknot.model.profile import SHIPPED, Profile


def shares_prefixes(profile: Profile) -> bool:
    """Whether an arm is the exact prefix cache: the server's own, with reuse off."""
    return profile.prefix_cache


def check_servable(arms: Mapping[str, Arm]) -> None:
    """ConfigError for an arm that a server would run as something else."""
    for name, arm in arms.items():
        profile = arm.profile
        if name != RECOMPUTE and not profile.reuses and not shares_prefixes(profile):
            raise ConfigError(f"arm {name}: a server runs every row of it as recompute does; use --engine embedded")


def named_files(arms: Mapping[str, Arm]) -> tuple[str, ...]:
    """The profiles that a server must be given as files, so that requests can name them."""
    found = (arm for arm in arms.values() if arm.name not in SHIPPED and not shares_prefixes(arm.profile))
    return tuple(arm.source for arm in found)


def check_profiles(where: str, served: Mapping[str, str], arms: Mapping[str, Arm]) -> None:
    """ConfigError for an arm that the server cannot run; ``served`` has the digests of its profiles by name."""
    check_servable(arms)
    for name, arm in arms.items():
        if shares_prefixes(arm.profile):
            continue
        digest = served.get(name)
        if digest is None:
            raise ConfigError(
                f"{where} does not have profile {name}; start it with --redknot-config FILE and, in that file, "
                f"profiles: [{arm.source}]"
            )
        if digest != arm.profile.digest():
            raise ConfigError(
                f"{where} has another profile by the name {name} than {arm.source}; start it with this one"
            )


class Wishes:
    """Makes the requests of arms. ``group`` is new for every group of requests whose prefix arms may share."""

    def __init__(self, arms: Mapping[str, Arm]) -> None:
        self._arms = arms
        self._group = uuid.uuid4().hex

    def begin(self) -> None:
        """The arm of the prefix cache starts with an empty one."""
        self._group = uuid.uuid4().hex

    def request(self, arm: str, prompt: Encoded, new_tokens: int, *, exact: bool = False) -> Request:
        """A request that shares nothing with any other, or in the prefix arm with those of its group."""
        profile = self._arms[arm].profile
        shares = shares_prefixes(profile)
        key = f"eval-{self._group}-{arm}" if shares else f"eval-{uuid.uuid4().hex}"
        return Request(prompt, self._wish(profile), new_tokens, key, exact=exact, shares=shares)

    def reply(self, arm: str, reply: Reply) -> Reply:
        """The reply as one of its arm.

        The prefix arm is recompute behind SGLang's own prefix cache: the server has no profile of its name, and its
        report says recompute.
        """
        profile = self._arms[arm].profile
        if not shares_prefixes(profile):
            return reply
        if reply.report["profile"] != RECOMPUTE:
            raise ServerError(f"another profile ran: {reply.report['profile']}, not {RECOMPUTE}")
        served: dict[str, Any] = {"profile": profile.name, "profile_digest": profile.digest()}
        return replace(reply, report={**reply.report, **served})

    def counted(self, arm: str, stream: Stream, checkpoint: str) -> Reply:
        """The reply of a stream that has ended; ServerError also where it does not count as one of its arm."""
        reply, request = self.reply(arm, stream.reply(checkpoint)), stream.request
        reason = objection(reply, request.prompt, request.new_tokens, checkpoint, self._arms[arm].profile)
        if reason is not None:
            raise ServerError(reason)
        return reply

    @staticmethod
    def _wish(profile: Profile) -> dict[str, Any]:
        if profile.reuses:
            return {"reuse": "auto", "profile": profile.name}
        return {"reuse": "off", "profile": RECOMPUTE}
