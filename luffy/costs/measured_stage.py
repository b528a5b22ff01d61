"""A stage program with its responses paced and its device's speed measured at the end; `luffy bench` starts it.

Run: python -m luffy.costs.measured_stage --config DIR/config.yaml --out DIR

DIR/pace.json says how long responses are (`luffy.costs.response_lengths`). Everything else is the stage's own program:
its engine, its trainer, its checkpoints, its export.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import GradingConfig, MathGrader
from luffy.config.settings import EvaluateSettings, RLSettings, SFTSettings
from luffy.costs.readings import DEVICE_FILE
from luffy.costs.response_lengths import Pace, read_pace, shuffled, spread_lengths
from luffy.pipeline.chain.job import read_job
from luffy.stages.program import StageContext, StageResult, main

_TRACES_READ = 512
_JUDGED = "measured_judge"
Run = Callable[[Any, StageContext], StageResult]


def measured(run: Run) -> Run:
    """The stage's `run`, after which the device's speed is measured and written to `device.json`."""

    def run_and_measure(settings: Any, context: StageContext) -> StageResult:
        result = run(settings, context)
        began = time.perf_counter()
        facts = _device(settings, context.execution)
        if isinstance(settings, SFTSettings):
            facts["num_examples"] = _num_examples(settings, context)
        if isinstance(settings, RLSettings | EvaluateSettings) and read_pace(context.out).way != "natural":
            facts["graders_s"] = _start_of_graders(settings.grading, context)
        facts["measuring_s"] = time.perf_counter() - began
        (context.out / DEVICE_FILE).write_text(json.dumps(facts), encoding="utf-8")
        return result

    return run_and_measure


def _device(settings: Any, execution: ExecutionConfig) -> dict[str, object]:
    from luffy.costs.device_speed import device_speed

    dtype = settings.model.dtype if hasattr(settings, "model") else settings.dtype
    name, flops, source = device_speed(dtype)
    return {"name": name, "peak_flops": flops, "peak_source": source}


def _num_examples(settings: SFTSettings, context: StageContext) -> int:
    """Examples of the whole stage."""
    from luffy.data.parquet import read_prompts
    from luffy.stages.sft import choose_prompts

    prompts = read_prompts(context.inputs["data"] / "sft.parquet")
    return sum(len(prompt.traces) for prompt in choose_prompts(prompts, settings.sft.num_traces, settings.seed))


def _start_of_graders(grading: GradingConfig, context: StageContext) -> float:
    """Seconds until the first answer is read that needs a process to read it.

    A run starts these processes at the first such answer; made-up responses have none.
    """
    from luffy.grading import GradeRequest, GraderPool

    if not isinstance(grading.kind, MathGrader):
        return 0.0
    with GraderPool.configured(context.execution.grader_workers, grading, context.out / _JUDGED) as graders:
        began = time.perf_counter()
        graders.grade([GradeRequest(r"\boxed{\frac{x+1}{2}}", r"\frac{1+x}{2}")])
        return time.perf_counter() - began


def _base() -> Run:
    from luffy.stages import base

    return base.run


def _sft() -> Run:
    from luffy.stages import sft

    return sft.run


def _rl() -> Run:
    from luffy.costs.paced_engine import EvenVerdicts, Lengths, PacedCluster, unlogged
    from luffy.stages import rl
    from luffy.stages.rl_components import Wrapping

    def run(settings: RLSettings, context: StageContext) -> StageResult:
        pace = read_pace(context.out)
        lengths: Lengths | None = _lengths(pace, settings.rl.max_response_tokens, settings.seed, context)
        wrapping = Wrapping(
            cluster=lambda cluster: PacedCluster(cluster, lengths, context.out),
            grader=partial(EvenVerdicts, boxed=pace.way != "natural"),
            validation_engine=unlogged,
        )
        return rl.run(settings, context, wrapping)

    return run


def _evaluate() -> Run:
    from luffy.costs.paced_engine import PacedSwappableEngine
    from luffy.stages import evaluate

    def run(settings: EvaluateSettings, context: StageContext) -> StageResult:
        limit = settings.evaluation.max_response_tokens
        lengths = _lengths(read_pace(context.out), limit, settings.seed, context)
        return evaluate.run(settings, context, lambda engine: PacedSwappableEngine(engine, lengths, context.out))

    return run


def _lengths(pace: Pace, limit: int, seed: int, context: StageContext) -> Callable[[int], list[int]] | None:
    """The lengths of so many responses; None for a policy that ends its responses itself."""
    if pace.way == "natural":
        return None
    if pace.way == "traces":
        return partial(_like_traces, _traces(context.inputs["data"], context.inputs["model"]), limit, seed)
    mean = float(limit) if pace.mean is None else pace.mean
    return lambda count: shuffled(spread_lengths(count, mean, limit), seed)


def _like_traces(traces: tuple[int, ...], limit: int, seed: int, count: int) -> list[int]:
    return shuffled([min(limit, traces[place * len(traces) // count]) for place in range(count)], seed)


@cache
def _traces(data: Path, model: Path) -> tuple[int, ...]:
    """Token counts of some traces, shortest first."""
    from luffy.data.parquet import iterate_prompts
    from luffy.data.templates import encode_traces, load_tokenizer

    texts = []
    for prompt in iterate_prompts(data / "train.parquet"):
        texts += [trace.text for trace in prompt.traces]
        if len(texts) >= _TRACES_READ:
            break
    return tuple(sorted(len(ids) for ids in encode_traces(load_tokenizer(model / "model"), texts)))


_RUNS: dict[str, Callable[[], Run]] = {"base": _base, "sft": _sft, "rl": _rl, "evaluate": _evaluate}


def _stage_of(arguments: list[str]) -> str:
    return read_job(Path(arguments[arguments.index("--config") + 1])).stage


if __name__ == "__main__":
    stage = _stage_of(sys.argv)
    main(stage, measured(_RUNS[stage]()))
