"""Benchmark problems inside training data.

    index = BenchmarkIndex(ngram=13, overlap=0.5)
    index.add("math500", prompts)
    index.finish()
    (hit,) = index.find([text])     # Hit("math500", 17, 0.93) or None

Two rules. A prompt that equals a problem, case and spacing aside, is that problem; so is one that asks its question
with other options, or with the same ones in another order. A text holds a problem when at least `overlap` of the
problem's runs of `ngram` words occur in it (GPT-3, arXiv 2005.14165, took one run of 13; competition problems share
whole sentences such as "where m and n are relatively prime positive integers"). For a problem shorter than two runs all
of them have to occur, since changing a number leaves most of them; one shorter than a run is found by the first rule
only. A multiple-choice question is looked for with and without its options.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from luffy.data.choices import without_options
from luffy.data.prompt_identity import problem_key, problem_text, text_key
from luffy.data.words import Hashes, run_hashes, word_hashes, words
from luffy.types import Prompt

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

    def __init__(self, ngram: int, overlap: float) -> None:
        self._ngram, self._overlap = ngram, overlap
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
            key = problem_key(prompt.messages)
            if key not in self._equal:
                self._take(benchmark, count, key, problem_text(prompt.messages))
            question = without_options(prompt)
            if text_key(question) not in self._equal:
                self._take(benchmark, count, text_key(question), question)
        return count

    def _take(self, benchmark: str, row: int, key: str, text: str) -> None:
        self._equal[key] = Hit(benchmark, row, 1.0)
        runs = np.unique(run_hashes(self._hashed(text), self._ngram))
        if len(runs):
            self._rows.append((benchmark, row, len(runs)))
            self._runs.append(runs)

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
        runs = run_hashes(np.concatenate(hashes), self._ngram)
        candidates = np.flatnonzero(np.isin(runs, self._sorted))
        owners = np.searchsorted(ends, candidates, side="right")
        inside = candidates + self._ngram <= ends[owners]
        for text in np.unique(owners[inside]).tolist():
            found[text] = self._hit(np.unique(runs[candidates[inside & (owners == text)]]))
        return found

    def _hit(self, runs: Hashes) -> Hit | None:
        first = np.searchsorted(self._sorted, runs, side="left")
        last = np.searchsorted(self._sorted, runs, side="right")
        owners = np.concatenate([self._owners[low:high] for low, high in zip(first, last, strict=True)])
        return self._best(np.bincount(owners))

    def _best(self, counts: np.ndarray) -> Hit | None:
        shares = [(counts[owner] / self._rows[owner][2], -int(owner)) for owner in np.flatnonzero(counts)]
        share, negative = max((each for each in shares if each[0] >= self._needed(-each[1])), default=(0.0, 0))
        if not share:
            return None
        benchmark, row, _ = self._rows[-negative]
        return Hit(benchmark, row, round(float(share), 4))

    def _needed(self, owner: int) -> float:
        return self._overlap if self._rows[owner][2] > self._ngram else 1.0

    def _hashed(self, text: str) -> Hashes:
        if len(self._known) > _MAX_REMEMBERED:
            self._known = {}
        return word_hashes(words(text), self._known)
