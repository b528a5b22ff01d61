"""A rollout engine whose responses have given lengths and whose calls are timed, and what goes with it in RL."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from luffy.cluster.protocol import Cluster
from luffy.costs.process_memory import peak_of_processes
from luffy.costs.readings import GENERATION_FILE, MEMORY_FILE
from luffy.grading import Grade, Grader, GradeRequest
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams, SwappableEngine
from luffy.training.learner import Trainer
from luffy.types import Outcome

Lengths = Callable[[int], Sequence[int]]
"""The lengths of that many responses."""


class PacedEngine:
    """The real engine; with `lengths`, no response ends before it has its length.

    Each call adds a line to `generation.jsonl` in `out`: its seconds, its responses and their tokens; without `out`
    none.
    """

    def __init__(self, engine: RolloutEngine, lengths: Lengths | None, out: Path | None) -> None:
        self._engine = engine
        self._lengths = lengths
        self._log = None if out is None else out / GENERATION_FILE

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""
        if self._lengths is not None:
            lengths = self._lengths(len(requests))
            most = params.max_response_tokens  # of a validation, which may have a limit of its own
            requests = [
                replace(each, max_new_tokens=min(length, most)) for each, length in zip(requests, lengths, strict=True)
            ]
            params = replace(params, stop_token_ids=(), stop=())
        began = time.perf_counter()
        completions = self._engine.generate(requests, params)
        self._note(completions, time.perf_counter() - began)
        return completions

    def unlogged(self) -> "PacedEngine":
        """The same engine and lengths, whose calls are not logged."""
        return PacedEngine(self._engine, self._lengths, None)

    def _note(self, completions: Sequence[Completion], seconds: float) -> None:
        if self._log is None:
            return
        tokens = sum(len(completion.token_ids) for completion in completions)
        line = {"seconds": seconds, "responses": len(completions), "tokens": tokens}
        with self._log.open("a", encoding="utf-8") as file:  # a single write, so threads cannot mix their lines
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the real engine."""
        self._engine.close()


def unlogged(engine: RolloutEngine) -> RolloutEngine:
    """A paced engine for the validation, whose calls are no rollouts."""
    assert isinstance(engine, PacedEngine)
    return engine.unlogged()


class PacedSwappableEngine(PacedEngine):
    """The same for an engine whose weights can be replaced."""

    def __init__(self, engine: SwappableEngine, lengths: Lengths | None, out: Path) -> None:
        super().__init__(engine, lengths, out)
        self._swappable = engine

    def load_weights_from(self, folder: Path, version: int) -> None:
        """Replace the real engine's weights."""
        self._swappable.load_weights_from(folder, version)


class PacedCluster:
    """The real cluster with a paced engine; before it ends, it writes the memory of its processes to `out`."""

    def __init__(self, cluster: Cluster, lengths: Lengths | None, out: Path) -> None:
        self._cluster = cluster
        self._lengths = lengths
        self._out = out

    @property
    def trainer(self) -> Trainer:
        return self._cluster.trainer

    @property
    def engine(self) -> RolloutEngine:
        return PacedEngine(self._cluster.engine, self._lengths, self._out)

    def publish(self, version: int) -> None:
        """Publish the weights as the real cluster does."""
        self._cluster.publish(version)

    def metrics(self) -> dict[str, float]:
        """Metrics of the real cluster."""
        return self._cluster.metrics()

    def __enter__(self) -> "PacedCluster":
        self._cluster.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        (self._out / MEMORY_FILE).write_text(json.dumps(peak_of_processes()), encoding="utf-8")
        self._cluster.__exit__(*error)


class EvenVerdicts:
    """The real grader, after which every second response counts as correct.

    So no group has zero variance, and no filter drops the samples of an untrained policy. With `boxed`, the grader gets
    boxed answers instead, half of them right: the samples of a policy with random weights, and responses that go on
    after their end, take far longer to grade than those of a real run.
    """

    def __init__(self, grader: Grader, *, boxed: bool) -> None:
        self._grader = grader
        self._boxed = boxed

    def grade(self, requests: Sequence[GradeRequest]) -> list[Grade]:
        """One grade per request, in order."""
        if self._boxed:
            requests = [replace(each, response=_boxed(each, place)) for place, each in enumerate(requests)]
        grades = self._grader.grade(requests)
        outcomes = (Outcome.WRONG if place % 2 else Outcome.CORRECT for place in range(len(grades)))
        return [
            replace(grade, outcome=outcome, own_reward=None) for grade, outcome in zip(grades, outcomes, strict=True)
        ]


def _boxed(request: GradeRequest, place: int) -> str:
    """A response with the right answer at every second place, and with another number at the others."""
    return f"\\boxed{{{place if place % 2 else request.ground_truth}}}"
