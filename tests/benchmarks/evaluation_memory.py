"""Memory and disk of an evaluation of very many long responses, and of what reads it afterwards.

Run: python tests/benchmarks/evaluation_memory.py [responses] [tokens a response]

A stand-in for an engine answers at once with random tokens; everything else is real: asking, grading, the stage's
files, `rescore`, `diff` and what the report and the leaderboard read. Each part runs in a process of its own, which
tells its peak (`ru_maxrss`) and, apart from it, what it has after its imports.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from luffy.cli.evaluations import diff, rescore
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.evaluation.finished import read_scores
from luffy.pipeline.machine.events import EventWriter
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.evaluate import run
from luffy.stages.program import StageContext
from luffy.types import FinishReason, Message, Prompt

PROBLEMS, SUITES = 50, ("first", "second")


class AtOnce:
    """An engine that says random words, and the answer."""

    weight_version = 0

    def __init__(self, words: Sequence[int], answer: Sequence[int], length: int) -> None:
        self._words, self._answer, self._length = words, tuple(answer), length

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        drawn = [self._ids(request.seed) for request in requests]
        return [Completion(ids, (), FinishReason.STOP, ()) for ids in drawn]

    def close(self) -> None: ...

    def load_weights_from(self, folder: Path, version: int) -> None: ...

    def _ids(self, seed: int) -> tuple[int, ...]:
        return (*random.Random(seed).choices(self._words, k=self._length - len(self._answer)), *self._answer)


def prepare(folder: Path) -> None:
    """Suites, and a model folder that has a tokenizer and nothing else."""
    (folder / "data" / "suites").mkdir(parents=True)
    question = "A farmer has geese and buys more of them. How many has she now? "
    words = " ".join(f"w{i}" for i in range(500))
    for suite in SUITES:
        prompts = [Prompt(f"{suite}{i}", suite, (Message("user", f"{i} {question}"),), "7") for i in range(PROBLEMS)]
        write_prompts(folder / "data" / "suites" / f"{suite}.parquet", prompts)
    tokenizer = build_tokenizer([f"{question} {words} \\boxed{{7}}"])
    (folder / "base" / "model").mkdir(parents=True)
    tokenizer.save_pretrained(folder / "base" / "model")
    (folder / "base" / "model" / "config.json").write_text("{}")


def evaluate(folder: Path, responses: int, tokens: int) -> None:
    """The stage, into `folder/out`."""
    from luffy.data.templates import load_tokenizer

    tokenizer = load_tokenizer(folder / "base" / "model")
    words = tokenizer(" ".join(f"w{i}" for i in range(500)), add_special_tokens=False)["input_ids"]
    engine = AtOnce(words, tokenizer("\\boxed{7}", add_special_tokens=False)["input_ids"], tokens)
    TransformersEngine.from_folder = lambda *arguments: engine  # type: ignore[method-assign,assignment,return-value]
    samples = responses // PROBLEMS // len(SUITES)
    evaluation = EvaluationConfig(
        decodings={"sampled": DecodingConfig(temperature=1.0, num_samples=samples)}, max_response_tokens=tokens
    )
    settings = EvaluateSettings(seed=0, dtype="float32", evaluation=evaluation, grading=GradingConfig())
    out = folder / "out"
    out.mkdir()
    inputs = {"data": folder / "data", "model": folder / "base"}
    events = EventWriter(out / "events.jsonl")
    run(settings, StageContext(out, inputs, "k", "evaluate_base", ExecutionConfig(), TrackingConfig(), events))


PARTS: dict[str, Callable[[Path, int, int], object]] = {
    "evaluate": evaluate,
    "rescore": lambda folder, *_: rescore(folder / "out", "math_strict", folder / "rescored", ()),
    "diff": lambda folder, *_: diff(folder / "out", folder / "rescored"),
    "report, leaderboard": lambda folder, *_: read_scores(folder / "out"),
}


def main() -> None:
    """Print a row a part."""
    responses, tokens = (int(argument) for argument in (sys.argv[1:] + ["20000", "4000"][len(sys.argv) - 1 :])[:2])
    scratch: AbstractContextManager[str] = tempfile.TemporaryDirectory()
    with scratch as name:
        folder = Path(name)
        prepare(folder)
        rows = [measured(part, folder, responses, tokens) for part in PARTS]
        size = sum(path.stat().st_size for path in (folder / "out").rglob("*") if path.is_file())
    table = Table("part", "s", "after imports, MiB", "peak, MiB", title=f"{responses:,} responses of {tokens:,} tokens")
    for part, (seconds, before, peak) in zip(PARTS, rows, strict=True):
        table.add_row(part, f"{seconds:.1f}", f"{before:.0f}", f"{peak:.0f}")
    Console().print(table)
    Console().print(f"on disk afterwards: {size / 2**20:.0f} MiB")


def measured(part: str, folder: Path, responses: int, tokens: int) -> tuple[float, float, float]:
    """Seconds, and MiB after imports and at most, of a process that does one part."""
    command = [sys.executable, __file__, "--part", part, str(folder), str(responses), str(tokens)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds, before, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, before, peak


def do(part: str, folder: Path, responses: int, tokens: int) -> None:
    """Do one part and say what it took."""
    before, began = _peak_mib(), time.perf_counter()
    PARTS[part](folder, responses, tokens)
    sys.stdout.write(json.dumps([time.perf_counter() - began, before, _peak_mib()]) + os.linesep)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        do(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
