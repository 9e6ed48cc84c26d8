"""What makes two blocks the same: names of contents, and the addresses of their files.

A name is a namespace and a key. The key is either the hash of the block's bytes or what the caller knows the bytes by;
the two cannot be confused. Neither is a chain over what precedes the block: the same tokens computed in another context
are other bytes, and other content. Two namespaces never share a name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from redknot.errors import StoreError

Hasher = Callable[[memoryview], bytes]

ADDRESS_BYTES = 32
_BY_CONTENT, _BY_CALLER = b"#", b"="


class Name(str):
    """What a sealed block can be found under; made by ``content_name`` and ``caller_name``.

    As a string, which keeps its hash and may have slots: tables of names and the look at a namespace are what the
    policy path spends its time in. It is the namespace behind its length, and the key, a character for each byte.
    """

    __slots__ = ("key", "namespace")
    namespace: str
    key: bytes

    def __new__(cls, namespace: str, key: bytes) -> Name:
        """A name, equal to those of equal namespace and key."""
        space = namespace.encode()
        made = super().__new__(cls, (len(space).to_bytes(8, "little") + space + key).decode("latin-1"))
        made.namespace, made.key = namespace, key
        return made


def content_name(namespace: str, digest: bytes) -> Name:
    """The name of a block by the hash of its bytes."""
    return Name(namespace, _BY_CONTENT + digest)


def caller_name(namespace: str, key: bytes) -> Name:
    """The name of a block by a key that the caller chose; StoreError for an empty key."""
    if not key:
        raise StoreError("a content key is empty; it must say what the block holds")
    return Name(namespace, _BY_CALLER + key)


def content_hash(data: memoryview) -> bytes:
    """XXH3 with 128 bits: 16 bytes. It is no defence against an attacker, which is why bytes are compared."""
    import xxhash  # late: a store that seals nothing by content does without

    digest: bytes = xxhash.xxh3_128_digest(data)
    return digest


def address(layout: bytes, name: Name) -> bytes:
    """Where a name lies on disk: a cryptographic hash of its length-prefixed parts, ``ADDRESS_BYTES`` long."""
    digest = hashlib.blake2b(digest_size=ADDRESS_BYTES, person=b"redknot-block")
    for part in (layout, name.namespace.encode(), name.key):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()
