"""Token ids as arrays, their rolling hashes, and the symbols that blocks and tails of a document are known by."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from redknot.errors import InputError

Tokens = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_MAX_ID = 2**31 - 1
BLOCK_BIT = np.uint64(1 << 63)  # set in block symbols, clear in tail symbols: in an interval the tails come first


def check_token_ids(tokens: object) -> Tokens:
    """`tokens` as contiguous int32, or InputError; an int32 array is returned as it is."""
    if not isinstance(tokens, np.ndarray):
        raise InputError(f"token ids must be a one-dimensional integer numpy array, found {type(tokens).__name__}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"token ids must be a one-dimensional integer array, found shape {tokens.shape} of {tokens.dtype}"
        )
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > _MAX_ID):
        raise InputError(f"token ids must lie in 0..{_MAX_ID}, found {int(tokens.min())}..{int(tokens.max())}")
    return np.ascontiguousarray(tokens, dtype=np.int32)


class RollingHash:
    """Polynomial hashes modulo 2^64 of all windows of a token array, from one prefix sum.

    Token ids are mixed (splitmix64, salted) before they are summed. The salt and base are random per instance unless
    `seed` is given, so nobody outside the process can prepare colliding contents. Tests override `windows`.
    """

    def __init__(self, seed: int | None = None) -> None:
        seed = secrets.randbits(64) if seed is None else seed % 2**64
        self._salt = np.uint64(seed)
        self._base = (int(self._mixed(np.array([seed & _MAX_ID]))[0]) & ~7) | 5  # 5 mod 8: order 2^62
        self._inverse = pow(self._base, -1, 2**64)
        self._powers: Hashes = np.ones(1, np.uint64)
        self._inverses: Hashes = np.ones(1, np.uint64)

    def prefix(self, tokens: Tokens | Ints) -> Hashes:
        """Prefix sums of length n + 1, the input of `windows`."""
        while self._powers.size <= tokens.size:
            self._powers = self._doubled(self._powers, self._base)
            self._inverses = self._doubled(self._inverses, self._inverse)
        terms = self._mixed(tokens)
        terms *= self._powers[: tokens.size]
        sums = np.zeros(tokens.size + 1, np.uint64)
        np.cumsum(terms, out=sums[1:])
        return sums

    def windows(self, prefix: Hashes, lengths: int | Ints, starts: int | Ints | None = None) -> Hashes:
        """Hashes of the windows [start, start + length); of all windows of one length where `starts` is None."""
        if starts is None:
            count = max(0, prefix.size - int(lengths))
            sums = prefix[prefix.size - count :] - prefix[:count]
            sums *= self._inverses[:count]
            return sums
        starts, lengths = np.atleast_1d(starts), np.atleast_1d(lengths)
        result: Hashes = (prefix[starts + lengths] - prefix[starts]) * self._inverses[starts]
        return result

    def _mixed(self, tokens: npt.NDArray[Any]) -> Hashes:
        x = tokens.astype(np.uint64)
        x *= np.uint64(0x9E3779B97F4A7C15)
        x += self._salt
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x ^= x >> np.uint64(shift)
            x *= np.uint64(factor)
        x ^= x >> np.uint64(31)
        return x

    @staticmethod
    def _doubled(powers: Hashes, base: int) -> Hashes:
        return np.concatenate([powers, powers * np.uint64(pow(base, powers.size, 2**64))])


def block_symbols(hashes: Hashes) -> Hashes:
    """Symbols of whole blocks: never equal to a tail's, whatever the hash function does."""
    return hashes | BLOCK_BIT


def tail_symbols(hashes: Hashes, lengths: int | Ints) -> Hashes:
    """Symbols of tails of 1.. tokens: the length in bits 40..62, 40 bits of the hash below it."""
    sized: Hashes = np.asarray(lengths).astype(np.uint64) << np.uint64(40)
    return sized | (hashes >> np.uint64(24))
