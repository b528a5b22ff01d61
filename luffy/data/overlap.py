"""Texts that say the same as others: near-duplicate problems, and benchmark problems inside training data.

    index = BenchmarkIndex()
    index.add("math500", prompts)
    index.finish()
    (hit,) = index.find([text])     # Hit("math500", 17, 0.93) or None

Near duplicates are found by MinHash (Broder 1997) over word triples, with candidates by banding. The share of equal
minima estimates the Jaccard similarity J of two problems' word triples, with a standard deviation of
sqrt(J (1 - J) / 128): 0.027 at J = 0.9. A signature takes 256 bytes. Traces have no signatures.

Two rules find a benchmark problem. A prompt that equals a problem, case and spacing aside, is that problem; so is one
that asks its question with other options, or with the same ones in another order. A text holds a problem when at least
half of the problem's runs of 13 words occur in it (GPT-3, arXiv 2005.14165, took one run of 13; competition
problems share whole sentences such as "where m and n are relatively prime positive integers"). For a problem shorter
than two runs all of them have to occur, since changing a number leaves most of them; one shorter than a run is found by
the first rule only. A multiple-choice question is looked for with and without its options.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from luffy.data.schema import problem_key, problem_text, text_key
from luffy.data.sources.column_mapping import without_options
from luffy.types import Prompt

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


Signatures = npt.NDArray[np.uint16]
"""One problem per row, `NUM_HASHES` minima each."""

NUM_HASHES = 128
_TRIPLE = 3
_BAND_ROWS = (16, 8, 4, 2)
_MARGIN = 0.1
_RNG = np.random.Generator(np.random.PCG64(20250421))
_FACTORS = _RNG.integers(0, 2**63, NUM_HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SHIFTS = _RNG.integers(0, 2**63, NUM_HASHES, dtype=np.uint64)


def word_triples(text: str) -> Hashes:
    """Return the hashes of a text's distinct word triples; a text of fewer than three words is a single one."""
    hashes = word_hashes(words(text), {})
    return np.unique(run_hashes(hashes, min(_TRIPLE, max(len(hashes), 1))))


def signature(text: str) -> Signatures:
    """Return the `(NUM_HASHES,)` signature of a problem."""
    items = word_triples(text)
    if not len(items):
        items = np.zeros(1, dtype=np.uint64)
    mixed = items[:, None] * _FACTORS + _SHIFTS
    return ((mixed ^ (mixed >> np.uint64(32))) >> np.uint64(16)).min(axis=0).astype(np.uint64).astype(np.uint16)


def similarity(one: Signatures, other: Signatures) -> float:
    return float((one == other).mean())


def near_duplicate_clusters(signatures: Signatures, threshold: float) -> npt.NDArray[np.int64]:
    """Return for each row the first row of its cluster of near duplicates, itself if it has none.

    Clusters are the connected components of pairs with a similarity of at least `threshold`. Within a band, a row is
    compared only with the first and the previous row that have the same minima, so time is linear except for sorting.
    """
    from scipy.sparse import coo_array  # slow, and the processes that prepare shards need none
    from scipy.sparse.csgraph import connected_components

    # The longest bands for which a pair `_MARGIN` below the threshold is compared with probability 1/2 or more: the
    # S-curve of banding rises at (1/b)^(1/r).
    fitting = (rows for rows in _BAND_ROWS if (rows / NUM_HASHES) ** (1 / rows) <= threshold - _MARGIN)
    band_rows = next(fitting, 1)
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    for start in range(0, NUM_HASHES, band_rows):
        keys = np.zeros(len(signatures), dtype=np.uint64)
        for column in signatures[:, start : start + band_rows].T:
            keys = (keys ^ column) * _FACTORS[0]
            keys ^= keys >> np.uint64(29)
        order = np.argsort(keys, kind="stable")
        is_head = np.concatenate([[True], keys[order][1:] != keys[order][:-1]])
        heads = np.flatnonzero(is_head)[np.cumsum(is_head) - 1]
        later = np.flatnonzero(~is_head)
        pairs += [np.stack([order[earlier], order[later]], axis=1) for earlier in (heads[later], later - 1)]
    candidates = np.unique(np.concatenate(pairs), axis=0)
    near = [similarity(signatures[low], signatures[high]) >= threshold for low, high in candidates]
    low, high = candidates[np.array(near, dtype=np.bool_)].T
    edges = coo_array((np.ones(len(low), dtype=np.bool_), (low, high)), shape=(len(signatures), len(signatures)))
    _, first, cluster = np.unique(
        connected_components(edges, directed=False)[1], return_index=True, return_inverse=True
    )
    return first[cluster]


_RUN_WORDS = 13
"""Length of the word runs that are compared; the longer, the fewer chance matches."""
_SHARE = 0.5
"""A text that contains at least this share of a problem's word runs holds the problem."""
_MAX_REMEMBERED = 200_000
"""Words whose hashes are cached; texts full of numbers would grow the cache without end."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A benchmark problem that was found."""

    benchmark: str
    row: int
    """Row of the benchmark, from 1."""
    share: float
    """Share of the problem's word runs that occur; 1 where the prompt equals the problem."""


class BenchmarkIndex:
    """All problems of the available benchmarks."""

    def __init__(self) -> None:
        self._equal: dict[str, Hit] = {}
        self._rows: list[tuple[str, int, int]] = []
        self._runs: list[Hashes] = []
        self._sorted: Hashes = np.zeros(0, dtype=np.uint64)
        self._owners = np.zeros(0, dtype=np.int64)
        self._known: dict[str, int] = {}

    def add(self, benchmark: str, prompts: Iterable[Prompt]) -> int:
        """Add a benchmark's problems, equal ones once; return its number of rows."""
        count = 0
        for count, prompt in enumerate(prompts, start=1):
            key, question = problem_key(prompt.messages), without_options(prompt)
            for each, text in ((key, problem_text(prompt.messages)), (text_key(question), question)):
                if each in self._equal:
                    continue
                self._equal[each] = Hit(benchmark, count, 1.0)
                runs = np.unique(run_hashes(self._hashed(text), _RUN_WORDS))
                if len(runs):
                    self._rows.append((benchmark, count, len(runs)))
                    self._runs.append(runs)
        return count

    def finish(self) -> "BenchmarkIndex":
        """Build the index; call it once, after the last `add`."""
        if self._runs:
            runs = np.concatenate(self._runs)
            owners = np.repeat(np.arange(len(self._runs)), [len(each) for each in self._runs])
            order = np.argsort(runs, kind="stable")
            self._sorted, self._owners = runs[order], owners[order]
        self._runs, self._known = [], {}
        return self

    def equal(self, prompt: Prompt) -> Hit | None:
        """Return the problem that the prompt equals, with its options or without them."""
        if not self._equal:
            return None
        return self._equal.get(problem_key(prompt.messages)) or self._equal.get(text_key(without_options(prompt)))

    def find(self, texts: Sequence[str]) -> list[Hit | None]:
        """Return for each text the problem of which it holds the largest share of runs, if that is enough."""
        found: list[Hit | None] = [None] * len(texts)
        if not len(self._sorted) or not texts:
            return found
        # All texts in one array: a call of numpy costs as much as the words of a short text.
        hashes = [self._hashed(text) for text in texts]
        ends = np.cumsum([len(each) for each in hashes])
        runs = run_hashes(np.concatenate(hashes), _RUN_WORDS)
        candidates = np.flatnonzero(np.isin(runs, self._sorted))
        owners = np.searchsorted(ends, candidates, side="right")
        inside = candidates + _RUN_WORDS <= ends[owners]
        for text in np.unique(owners[inside]).tolist():
            found[text] = self._best(np.unique(runs[candidates[inside & (owners == text)]]))
        return found

    def _best(self, runs: Hashes) -> Hit | None:
        """The problem with the largest share of its runs among `runs`, where that suffices; of equal ones the first."""
        first = np.searchsorted(self._sorted, runs, side="left")
        last = np.searchsorted(self._sorted, runs, side="right")
        owners = np.concatenate([self._owners[low:high] for low, high in zip(first, last, strict=True)])
        best: Hit | None = None
        for owner, count in zip(*np.unique(owners, return_counts=True), strict=True):
            benchmark, row, size = self._rows[owner]
            share = count / size
            if share >= (_SHARE if size > _RUN_WORDS else 1.0) and (best is None or share > best.share):
                best = Hit(benchmark, row, float(share))
        return None if best is None else replace(best, share=round(best.share, 4))

    def _hashed(self, text: str) -> Hashes:
        if len(self._known) > _MAX_REMEMBERED:
            self._known = {}
        return word_hashes(words(text), self._known)
