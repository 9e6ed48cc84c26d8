"""Every way RedKnot says no: exceptions for callers, reasons for reports.

Exceptions carry one line that names what was found, what is supported and the way out. Reasons are
two closed sets: a *document* reason turns one document back into new text, a
*request* reason makes the whole request run dense. Both appear in the response, the log and the metrics.
"""

from __future__ import annotations

from enum import StrEnum


class RedKnotError(Exception):
    """Base class: a user's mistake or an environment that cannot serve; the message is one line."""


class ConfigError(RedKnotError):
    """A configuration value, profile or command line that cannot be used."""


class UnsupportedModelError(RedKnotError):
    """A checkpoint that is not DeepSeek-V4, or that holds tensors or dtypes RedKnot does not know."""


class CheckpointError(RedKnotError):
    """A checkpoint of a supported model whose files are missing, truncated or inconsistent."""


class InputError(RedKnotError):
    """A document, prompt or request that is malformed (empty, too long, wrong type, bad span)."""


class StoreError(RedKnotError):
    """The artifact store cannot be opened, read or written."""


class CorruptSectionError(StoreError):
    """A stored section failed its checksum or its header check; it has been quarantined."""


class ReuseUnavailableError(RedKnotError):
    """Reuse was required by the caller and the request would have run dense; names the reason."""


class DocumentReason(StrEnum):
    """Why one document of a request is new text although other documents may be reused."""

    TOO_SHORT = "too_short"
    NO_MATCH = "no_match"
    NOT_BUILT = "not_built"
    NOT_WORTH_IT = "not_worth_it"
    OTHER_NAMESPACE = "other_namespace"
    EXACT_PREFIX = "exact_prefix"


class RequestReason(StrEnum):
    """Why a whole request is recomputed."""

    REUSE_OFF = "reuse_off"
    NOTHING_TO_REUSE = "nothing_to_reuse"
    MISSING_LAYER = "missing_layer"
    CORRUPT_SECTION = "corrupt_section"
    TOKEN_MISMATCH = "token_mismatch"
    PROFILE_MISMATCH = "profile_mismatch"
    GEOMETRY_MISMATCH = "geometry_mismatch"
    IDENTITY_MISMATCH = "identity_mismatch"
    STALE_GENERATION = "stale_generation"
    RANK_DISAGREEMENT = "rank_disagreement"
    SECTION_LATE = "section_late"
    STORE_UNAVAILABLE = "store_unavailable"
    UNSUPPORTED_MODEL = "unsupported_model"
