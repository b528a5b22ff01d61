"""What the schedule of generation costs where a few responses are far longer than the others: a simulation.

Run: python tests/benchmarks/long_tails.py [--rows 256] [--group 8] [--engines 1] [--slots 256] [--step-ms 10]
[--row-us 16] [--update-s 6.3] [--mean 1200] [--longest 8192] [--cut-share 0.01] [--steps 200]

Lengths are lognormal, cut at `longest`, with the given mean and share of cut responses. A decoding step of an engine
with n running rows takes `step-ms` + n x `row-us`; prefill and the transfer of weights are left out. The defaults are
docs/gpus.md's figures for 0.5B on one H200: 256 rows decode in 14.1 ms a step, and an update of them takes 6.3 s at
56,500 tokens/s; the trainer and the engines have GPUs of their own. `steps/hour` are updates of `rows` responses.
Staleness is that of a token: updates between its weights and those that learn from it.

- `step by step`: `rl.max_staleness: 0`
- `steps ahead, k`: `rl.max_staleness: k`. The rows of the next k steps are in the engines' queues as soon as the bound
  allows it, and fill the slots that a step's last rows leave
- `partial, T tokens`: `rl.partial_rollout_tokens: T`. Each step begins `rows` rows, gives every unfinished one up to T
  tokens, and learns from the groups of `group` rows that are complete, while the engines wait
- `first finished, k`: an update takes the `rows` responses that are finished first, with (k + 1) x `rows` on their way
"""

import argparse
import heapq
import math
import random
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from measuring import show


@dataclass
class Row:
    step: int
    """The update that learns from it, where the schedule fixes it."""
    left: int
    """Tokens that it has yet to generate."""
    versions: Counter[int] = field(default_factory=Counter)
    """Number of its tokens by the version of their weights."""


class Engine:
    """Continuous batching: a free slot is taken at once, and every running row gets a token in each decoding step."""

    def __init__(self, slots: int, step_s: float, row_s: float) -> None:
        self.waiting: deque[Row] = deque()
        self.finished: list[Row] = []
        self.version = 0
        self._slots, self._step_s, self._row_s = slots, step_s, row_s
        self._running: list[tuple[float, int, Row]] = []
        self._began: dict[int, float] = {}
        """Decoding steps at which the tokens of a running row that are not in its `versions` began."""
        self._now_s = self._decoded = 0.0
        self._number = 0

    def next_s(self) -> float:
        """When a row finishes next."""
        self._fill()
        if not self._running:
            return math.inf
        return self._now_s + (self._running[0][0] - self._decoded) * self._pace_s()

    def advance(self, until_s: float) -> None:
        while (end_s := self.next_s()) <= until_s:
            self._decoded, self._now_s = self._running[0][0], end_s
            _, number, row = heapq.heappop(self._running)
            self._count(number, row)
            del self._began[number]
            self.finished.append(row)
        if self._running:
            self._decoded += (until_s - self._now_s) / self._pace_s()
        self._now_s = until_s

    def publish(self, version: int) -> None:
        for _, number, row in self._running:
            self._count(number, row)
        self.version = version

    def _pace_s(self) -> float:
        return self._step_s + self._row_s * len(self._running)

    def _fill(self) -> None:
        while self.waiting and len(self._running) < self._slots:
            row = self.waiting.popleft()
            self._number += 1
            self._began[self._number] = self._decoded
            heapq.heappush(self._running, (self._decoded + row.left, self._number, row))

    def _count(self, number: int, row: Row) -> None:
        row.versions[self.version] += round(self._decoded - self._began[number])
        self._began[number] = self._decoded


class Simulation:
    """`rows` responses an update, spread evenly over the engines."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        step_s, row_s = options.step_ms / 1e3, options.row_us / 1e6
        self.engines = [Engine(options.slots, step_s, row_s) for _ in range(options.engines)]
        self.lengths = lengths(options.mean, options.longest, options.cut_share)
        self.now_s = 0.0
        self.staleness: Counter[int] = Counter()

    def add(self, step: int, number: int) -> None:
        for i in range(number):
            self.engines[i % len(self.engines)].waiting.append(Row(step, next(self.lengths)))

    def finished(self, step: int | None = None) -> int:
        """Rows of `step`, or of any, that no update has learned from."""
        return sum(step in (None, row.step) for engine in self.engines for row in engine.finished)

    def wait(self, done: Callable[[], bool]) -> None:
        """Let the engines work until `done`."""
        while not done():
            self.advance(min(engine.next_s() for engine in self.engines))

    def advance(self, until_s: float) -> None:
        for engine in self.engines:
            engine.advance(until_s)
        self.now_s = until_s

    def update(self, version: int, learned: list[Row]) -> None:
        """Learn from rows while the engines go on, and publish the weights."""
        for row in learned:
            for of, number in row.versions.items():
                self.staleness[version - 1 - of] += number
        self.advance(self.now_s + self.options.update_s * len(learned) / self.options.rows)
        for engine in self.engines:
            engine.publish(version)

    def take(self, number: int, step: int | None = None) -> list[Row]:
        """The rows of `step`, or those that were finished first."""
        finished = [(row, engine) for engine in self.engines for row in engine.finished if step in (None, row.step)]
        for row, engine in finished[:number]:
            engine.finished.remove(row)
        return [row for row, _ in finished[:number]]


def ahead(world: Simulation, k: int) -> int:
    """Whole steps, up to `k` ahead; returns the number of rows learned from."""
    submitted, rows = 0, world.options.rows
    for step in range(1, world.options.steps + 1):
        while submitted < step + k:
            submitted += 1
            world.add(submitted, rows)
        world.wait(lambda step=step: world.finished(step) == rows)
        world.update(step, world.take(rows, step))
    return world.options.steps * rows


def partial(world: Simulation, tokens: int) -> int:
    """Rounds of at most `tokens` tokens a row; a group is learned from in the round in which its last row ends."""
    size, learned, groups = world.options.group, 0, list[list[Row]]()
    for step in range(1, world.options.steps + 1):
        for _ in range(world.options.rows // size):
            groups.append([Row(step, next(world.lengths)) for _ in range(size)])
        running = [row for group in groups for row in group if row.left]
        rest = {id(row): max(row.left - tokens, 0) for row in running}
        for i, row in enumerate(running):
            row.left = min(row.left, tokens)
            world.engines[i % len(world.engines)].waiting.append(row)
        number = len(running)
        world.wait(lambda number=number: world.finished() == number)
        for row in world.take(number):
            row.left = rest[id(row)]
        complete = [row for group in groups if not any(row.left for row in group) for row in group]
        groups = [group for group in groups if any(row.left for row in group)]
        world.update(step, complete)
        learned += len(complete)
    return learned


def first_finished(world: Simulation, k: int) -> int:
    """An update takes what is finished first; (k + 1) x `rows` are running, queued or finished."""
    rows = world.options.rows
    world.add(0, (k + 1) * rows)
    for step in range(1, world.options.steps + 1):
        world.wait(lambda: world.finished() >= rows)
        learned = world.take(rows)
        world.add(0, rows)
        world.update(step, learned)
    return world.options.steps * rows


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
    whole = {"rows": 256, "group": 8, "engines": 1, "slots": 256, "longest": 8192, "steps": 200}
    real = {"step-ms": 10.0, "row-us": 16.0, "update-s": 6.3, "mean": 1200.0, "cut-share": 0.01}
    for name, default in (whole | real).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    ways: list[tuple[str, Callable[[Simulation, int], int], int]] = [
        ("step by step", ahead, 0),
        *((f"steps ahead, {k}", ahead, k) for k in (1, 2, 3)),
        *((f"partial, {tokens:,} tokens", partial, tokens) for tokens in (1024, 2048, 4096)),
        *((f"first finished, {k}", first_finished, k) for k in (1, 2)),
    ]
    rows = []
    for name, way, argument in ways:
        world = Simulation(options)
        an_hour = way(world, argument) / options.rows / world.now_s * 3600
        total = sum(world.staleness.values())
        mean = sum(age * number for age, number in world.staleness.items()) / total
        rows.append((name, f"{an_hour:.1f}", f"{mean:.2f}", str(max(world.staleness))))
    show(("schedule", "steps/hour", "mean staleness", "largest"), rows)


if __name__ == "__main__":
    main()
