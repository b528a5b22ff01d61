"""What the schedule of generation costs where a few responses are far longer than the others: a simulation.

Run: python tests/benchmarks/long_tails.py [--rows 256] [--group 8] [--slots 256] [--step-ms 10] [--row-us 16]
[--update-s 6.3] [--mean 1200] [--longest 8192] [--cut-share 0.01] [--steps 200]

Lengths are lognormal, cut at `longest`, with the given mean and share of cut responses. A decoding step of an engine
with n running rows takes `step-ms` + n x `row-us`; prefill and the transfer of weights are left out. The defaults are
docs/gpus.md's figures for 0.5B on one H200: 256 rows decode in 14.1 ms a step, and an update of them takes 6.3 s at
56,500 tokens/s; the trainer and the engine have GPUs of their own. `steps/hour` are updates of `rows` responses.
Staleness is that of a token: updates between its weights and those that learn from it.

- `step by step`: `rl.max_staleness: 0`
- `steps ahead, k`: `rl.max_staleness: k`. The rows of the next k steps are in the engine's queue as soon as the bound
  allows it, and fill the slots that a step's last rows leave
- `partial, T tokens`: `rl.partial_rollout_tokens: T`. Each step begins `rows` rows, gives every unfinished one up to T
  tokens, and learns from the groups of `group` rows that are complete, while the engine waits
"""

import argparse
import heapq
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from measuring import show


@dataclass
class Row:
    left: int
    """Tokens that it has yet to generate."""
    versions: Counter[int] = field(default_factory=Counter)
    """Number of its tokens by the version of their weights."""


class Simulation:
    """A trainer, and an engine with continuous batching: a free slot is taken at once, each step gives rows a token."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.lengths = lengths(options.mean, options.longest, options.cut_share)
        self.now_s = 0.0
        self.staleness: Counter[int] = Counter()
        self._version = 0
        self._waiting: deque[Row] = deque()
        self._running: list[tuple[float, int, Row]] = []
        """By the decoding step at which they end, counted since the start."""
        self._began: dict[int, float] = {}
        """Decoding steps at which the tokens of a running row that are not in its `versions` began."""
        self._decoded = 0.0
        self._number = 0

    def add(self, rows: Sequence[Row]) -> None:
        self._waiting.extend(rows)

    def new_rows(self, number: int) -> list[Row]:
        return [Row(next(self.lengths)) for _ in range(number)]

    def wait(self, rows: Sequence[Row]) -> None:
        """Decode until these rows have no tokens left."""
        while any(row.left for row in rows):
            self._decode_until(self._next_s())

    def update(self, step: int, learned: Sequence[Row]) -> None:
        """Learn from rows while the engine decodes, and give it weights of version `step`."""
        for row in learned:
            for version, tokens in row.versions.items():
                self.staleness[step - 1 - version] += tokens
        self._decode_until(self.now_s + self.options.update_s * len(learned) / self.options.rows)
        for _, number, row in self._running:
            self._count(number, row)
        self._version = step

    def _pace_s(self) -> float:
        return self.options.step_ms / 1e3 + self.options.row_us / 1e6 * len(self._running)

    def _next_s(self) -> float:
        """When a row finishes next, once the free slots are filled."""
        while self._waiting and len(self._running) < self.options.slots:
            row = self._waiting.popleft()
            self._number += 1
            self._began[self._number] = self._decoded
            heapq.heappush(self._running, (self._decoded + row.left, self._number, row))
        if not self._running:
            return math.inf
        return self.now_s + (self._running[0][0] - self._decoded) * self._pace_s()

    def _decode_until(self, until_s: float) -> None:
        while (end_s := self._next_s()) <= until_s:
            self._decoded, self.now_s = self._running[0][0], end_s
            _, number, row = heapq.heappop(self._running)
            self._count(number, row)
            del self._began[number]
            row.left = 0
        if self._running:
            self._decoded += (until_s - self.now_s) / self._pace_s()
        self.now_s = until_s

    def _count(self, number: int, row: Row) -> None:
        row.versions[self._version] += round(self._decoded - self._began[number])
        self._began[number] = self._decoded


def ahead(world: Simulation, k: int) -> int:
    """Whole steps, up to `k` ahead; returns the number of rows learned from."""
    submitted: deque[list[Row]] = deque()
    for step in range(1, world.options.steps + 1):
        while len(submitted) <= k:
            submitted.append(world.new_rows(world.options.rows))
            world.add(submitted[-1])
        rows = submitted.popleft()
        world.wait(rows)
        world.update(step, rows)
    return world.options.steps * world.options.rows


def partial(world: Simulation, tokens: int) -> int:
    """Rounds of at most `tokens` tokens a row; a group is learned from in the round in which its last row ends."""
    size, learned, groups = world.options.group, 0, list[list[Row]]()
    for step in range(1, world.options.steps + 1):
        groups += [world.new_rows(size) for _ in range(world.options.rows // size)]
        running = [row for group in groups for row in group if row.left]
        rest = [max(row.left - tokens, 0) for row in running]
        for row in running:
            row.left = min(row.left, tokens)
        world.add(running)
        world.wait(running)
        for row, left in zip(running, rest, strict=True):
            row.left = left
        complete = [row for group in groups if not any(row.left for row in group) for row in group]
        groups = [group for group in groups if any(row.left for row in group)]
        world.update(step, complete)
        learned += len(complete)
    return learned


def lengths(mean: float, longest: int, cut_share: float) -> Iterator[int]:
    """Lengths of responses: of lognormals with that share above `longest`, the one whose cut values have the mean."""
    normal, seeded = statistics.NormalDist(), random.Random(0)
    tail = normal.inv_cdf(1 - cut_share)
    low, high = 0.01, 5.0
    for _ in range(60):
        sigma = (low + high) / 2
        mu = math.log(longest) - tail * sigma
        found = math.exp(mu + sigma**2 / 2) * normal.cdf(tail - sigma) + cut_share * longest
        low, high = (sigma, high) if found > mean else (low, sigma)
    while True:
        yield max(1, min(longest, round(seeded.lognormvariate(mu, sigma))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = {"rows": 256, "group": 8, "slots": 256, "longest": 8192, "steps": 200}
    real = {"step-ms": 10.0, "row-us": 16.0, "update-s": 6.3, "mean": 1200.0, "cut-share": 0.01}
    for name, default in (whole | real).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    ways = [
        ("step by step", ahead, 0),
        *((f"steps ahead, {k}", ahead, k) for k in (1, 2, 3)),
        *((f"partial, {tokens:,} tokens", partial, tokens) for tokens in (1024, 2048, 4096)),
    ]
    rows = []
    for name, way, argument in ways:
        world = Simulation(options)
        an_hour = way(world, argument) / options.rows / world.now_s * 3600
        mean = sum(age * number for age, number in world.staleness.items()) / world.staleness.total()
        rows.append((name, f"{an_hour:.1f}", f"{mean:.2f}", str(max(world.staleness))))
    show(("schedule", "steps/hour", "mean staleness", "largest"), rows)


if __name__ == "__main__":
    main()
