"""The store's own exceptions and how each maps to a request reason.

All are ``StoreError``: callers that only need "this artifact cannot be used" catch that one class and
ask ``request_reason`` why.
"""

from __future__ import annotations

import errno
import os

from redknot.errors import CorruptSectionError, RequestReason, StoreError


class MalformedFileError(StoreError):
    """A file whose header, names, offsets or certificate break the format; nothing was allocated for it."""


class MissingSectionError(StoreError):
    """A section that the caller asked for and the certificate does not list."""


class StaleGenerationError(StoreError):
    """The generation that was loaded has been replaced or removed, and its files are gone."""


class LayoutVersionError(StoreError):
    """An artifact written in a layout that this version does not read."""


_REASONS: tuple[tuple[type[StoreError], RequestReason], ...] = (
    (CorruptSectionError, RequestReason.CORRUPT_SECTION),
    (MalformedFileError, RequestReason.CORRUPT_SECTION),
    (MissingSectionError, RequestReason.MISSING_LAYER),
    (StaleGenerationError, RequestReason.STALE_GENERATION),
    (LayoutVersionError, RequestReason.GEOMETRY_MISMATCH),
)


def request_reason(error: StoreError) -> RequestReason:
    """Return the request reason of a store error; STORE_UNAVAILABLE for one that names no artifact fault."""
    for kind, reason in _REASONS:
        if isinstance(error, kind):
            return reason
    return RequestReason.STORE_UNAVAILABLE


def describe_os_error(action: str, path: str | os.PathLike[str], error: OSError) -> str:
    """Return one line with the action, the file, the errno and its meaning."""
    number = error.errno or 0
    name = errno.errorcode.get(number, "unknown")
    where = error.filename if isinstance(error.filename, str) else os.fspath(path)
    return f"cannot {action} {where}: errno {number} ({name}): {error.strerror or error}"
