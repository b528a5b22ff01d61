"""Near-duplicate problems: MinHash (Broder 1997) over word triples, candidates by banding.

The share of equal minima estimates the Jaccard similarity J of two problems' word triples, with a standard deviation of
sqrt(J (1 - J) / 128): 0.027 at J = 0.9. A signature takes 256 bytes. Traces have no signatures.
"""

import numpy as np
import numpy.typing as npt

from luffy.data.words import Hashes, run_hashes, word_hashes, words

Signatures = npt.NDArray[np.uint16]
"""One problem per row, `NUM_HASHES` minima each."""

NUM_HASHES = 128
_TRIPLE = 3
_BAND_ROWS = (16, 8, 4, 2)
_MARGIN = 0.1
"""Bands are chosen so that a pair this far below the threshold becomes a candidate with probability 1/2 or more."""
_RNG = np.random.Generator(np.random.PCG64(20250421))
_FACTORS = _RNG.integers(0, 2**63, NUM_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SHIFTS = _RNG.integers(0, 2**63, NUM_HASHES, dtype=np.uint64)


def signature(text: str) -> Signatures:
    """Return the `(NUM_HASHES,)` signature of a problem; a text of fewer than three words is a single item."""
    hashes = word_hashes(words(text), {})
    items = np.unique(run_hashes(hashes, min(_TRIPLE, max(len(hashes), 1))))
    if not len(items):
        items = np.zeros(1, dtype=np.uint64)
    mixed = items[:, None] * _FACTORS + _SHIFTS
    return ((mixed ^ (mixed >> np.uint64(32))) >> np.uint64(16)).min(axis=0).astype(np.uint64).astype(np.uint16)


def similarity(one: Signatures, other: Signatures) -> float:
    """Return the estimated Jaccard similarity of two problems."""
    return float((one == other).mean())


def near_duplicate_clusters(signatures: Signatures, threshold: float) -> npt.NDArray[np.int64]:
    """Return for each row the first row of its cluster of near duplicates, itself if it has none.

    Clusters are the connected components of pairs with a similarity of at least `threshold`. Within a band, a row is
    compared only with the first and the previous row that have the same minima, so time is linear except for sorting.
    """
    first = np.arange(len(signatures))
    for low, high in _candidates(signatures, _rows_per_band(threshold)):
        if similarity(signatures[low], signatures[high]) >= threshold:
            one, other = _root(first, low), _root(first, high)
            first[max(one, other)] = min(one, other)
    for row in range(len(first)):
        first[row] = first[first[row]]  # earlier rows already point to their root
    return first


def _rows_per_band(threshold: float) -> int:
    """Longest bands for which a pair `_MARGIN` below the threshold becomes a candidate with probability 1/2 or more
    (threshold of the S-curve: (1/b)^(1/r))."""
    for rows in _BAND_ROWS:
        if (rows / NUM_HASHES) ** (1 / rows) <= threshold - _MARGIN:
            return rows
    return 1


def _candidates(signatures: Signatures, rows: int) -> list[list[int]]:
    """Pairs (earlier, later) that share a band: each row with the first and the previous row of equal minima."""
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for start in range(0, NUM_HASHES, rows):
        keys = _band_keys(signatures[:, start : start + rows])
        order = np.argsort(keys, kind="stable")
        is_head = np.concatenate([[True], keys[order][1:] != keys[order][:-1]])
        heads = np.flatnonzero(is_head)[np.cumsum(is_head) - 1]
        later = np.flatnonzero(~is_head)
        for earlier in (heads[later], later - 1):
            pairs.append(np.stack([order[earlier], order[later]], axis=1))
    found: list[list[int]] = np.unique(np.concatenate(pairs), axis=0).tolist()
    return found


def _root(first: npt.NDArray[np.int64], row: int) -> int:
    while first[row] != row:
        row = int(first[row])
    return row


def _band_keys(band: Signatures) -> Hashes:
    keys = np.zeros(len(band), dtype=np.uint64)
    for column in band.T:
        keys = (keys ^ column) * _FACTORS[0]
        keys ^= keys >> np.uint64(29)
    return keys
