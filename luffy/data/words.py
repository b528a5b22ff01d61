"""The words by which texts are compared: case, spacing and punctuation do not matter."""

import hashlib
import re

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
_WORD = re.compile(r"\w+|[-+*/=<>^]")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd: products spread over all bits


def words(text: str) -> list[str]:
    """Return the words and the signs of arithmetic: `x+1` and `x-1` are different problems."""
    return _WORD.findall(text.casefold())


def word_hashes(found: list[str], known: dict[str, int]) -> Hashes:
    """Return a 64-bit hash of each word; `known` caches the hashes of earlier texts."""
    for word in set(found) - known.keys():
        known[word] = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
    return np.fromiter(map(known.__getitem__, found), dtype=np.uint64, count=len(found))


def run_hashes(hashes: Hashes, length: int) -> Hashes:
    """Return a hash of each run of `length` words, in order; none where there are fewer words."""
    count = len(hashes) - length + 1
    if count < 1:
        return np.zeros(0, dtype=np.uint64)
    runs = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        runs = (runs ^ hashes[offset : offset + count]) * _FACTOR
        runs ^= runs >> np.uint64(29)
    return runs
