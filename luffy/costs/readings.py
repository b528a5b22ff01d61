"""Speeds and times (`luffy.costs.stage_times`) of a measured stage, read from the files that it wrote."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from luffy.costs.held_out_times import mean_seconds, total_seconds
from luffy.costs.response_lengths import Pace
from luffy.costs.stage_times import StageTimes
from luffy.tracking.metrics import METRICS_FILE, MetricRow, read_metrics, training_rows

DEVICE_FILE = "device.json"
GENERATION_FILE = "generation.jsonl"
MEMORY_FILE = "memory.json"
_STEP = "perf/step_s"
_PARTS = {
    "generation": "perf/generation_s",
    "grading": "perf/grading_s",
    "weights": "perf/weights_s",
    "batch": "perf/batch_s",
    "logp_old": "perf/logp_old_s",
    "reference": "perf/reference_s",
    "teacher": "perf/teacher_s",
    "update": "perf/update_s",
}
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A stage program that has ended."""

    out: Path
    """Its directory."""
    wall_s: float
    """Wall-clock time from its start to its end."""
    progress: Sequence[tuple[int, float]]
    """Steps that it reported, and when (seconds since the epoch)."""

    def facts(self, name: str) -> dict[str, Any]:
        """A JSON file in its directory; empty where there is none."""
        file = self.out / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


@dataclass(frozen=True, slots=True)
class Reading:
    """The speeds of one stage."""

    node: str
    times: StageTimes
    measured: str
    """How much was measured, in words."""
    generated_tokens_per_s: float | None = None
    """Speed of the engine while it generates; None where nothing is generated."""
    trained_tokens_per_s: float | None = None
    """Tokens of prompts and responses in a step, divided by its time without waiting for generation."""
    step_s: float | None = None
    parts: Mapping[str, float] | None = None
    """Seconds of a step by part; None for an evaluation."""
    overlaps: bool = False
    """Whether generation of later steps goes on during the other parts."""
    mfu: float | None = None
    """Counted operations of training per second, as a share of the device's peak."""
    peak: str = ""
    """What the peak is and where it comes from, in words."""
    memory_gib: Mapping[str, float] | None = None
    """Peak of each process, and of torch on the GPU of rank 0."""
    same_as: str = ""
    """The evaluation that was measured in place of this one; empty: this one."""
    response_words: str = ""
    """The assumption about the lengths of responses, and the resulting lengths."""


def read_training(
    run: MeasuredRun,
    node: str,
    *,
    skipped: int,
    ahead: int,
    source: str,
    num_units: int | None = None,
    pace: Pace | None = None,
    validation: str = "",
) -> Reading:
    """The reading of `base`, `sft` or `rl`; without its first `skipped` and its last `ahead` steps, which differ.

    Where rollouts run ahead of the trainer, it waits at the beginning, and nothing is generated at the end.
    `validation` says what was measured while it trained (`luffy.costs.held_out_times.measured_by`).
    """
    logged = read_metrics(run.out / METRICS_FILE)
    rows = training_rows(logged)
    usual = rows[skipped : len(rows) - ahead]
    step_s = fmean(row[_STEP] for row in usual)
    save_s = _save_s(run, rows)
    device = run.facts(DEVICE_FILE)
    is_rl = pace is not None
    # RL writes a checkpoint after its last step, always; base and sft only wrote one because the bench asked for it.
    fixed_s = _program_s(run) - len(rows) * step_s - (0.0 if is_rl else save_s) - total_seconds(logged)
    parts = _parts(usual, step_s)
    generated = _mean_rate(run) if is_rl else (None, None)
    return Reading(
        node=node,
        times=StageTimes(max(0.0, fixed_s), step_s, save_s, num_units, source, mean_seconds(logged), validation),
        measured=f"{len(usual)} steps",
        generated_tokens_per_s=generated[0],
        trained_tokens_per_s=_mean(usual, "perf/train_tokens_per_s") or _mean(usual, "perf/tokens_per_s"),
        step_s=step_s,
        parts=parts,
        overlaps=bool(ahead),
        mfu=_mfu(usual, device),
        peak=_peak_words(device),
        memory_gib=_memory(run, rows),
        response_words=_response_words(pace, generated[1]),
    )


def read_evaluation(
    run: MeasuredRun, node: str, num_responses: int, every: int | None, *, source: str, pace: Pace
) -> Reading:
    """The reading of an evaluation of `num_responses`; the whole one has `every` (None: unknown)."""
    calls = _calls(run)
    busy_s = sum(call["seconds"] for call in calls)
    speed, mean = _mean_rate(run)
    fixed_s = max(0.0, _program_s(run) - busy_s)
    return Reading(
        node=node,
        times=StageTimes(fixed_s, busy_s / num_responses, 0.0, every, source),
        measured=f"{num_responses} responses",
        generated_tokens_per_s=speed,
        response_words=_response_words(pace, mean),
    )


def _program_s(run: MeasuredRun) -> float:
    """Seconds of the stage's own program: without what was measured at its end, but with the start of its graders."""
    device = run.facts(DEVICE_FILE)
    return run.wall_s - device.get("measuring_s", 0.0) + device.get("graders_s", 0.0)


def _parts(rows: Sequence[MetricRow], step_s: float) -> dict[str, float]:
    """Mean seconds by part; `generation` without grading, and `other` for what no part counts."""
    parts = {part: mean for part, name in _PARTS.items() if (mean := _mean(rows, name)) is not None}
    if "generation" in parts:
        parts["generation"] = max(0.0, parts["generation"] - parts["grading"])
    return parts | {"other": max(0.0, step_s - sum(parts.values()))}


def _save_s(run: MeasuredRun, rows: Sequence[MetricRow]) -> float:
    """Seconds of the checkpoint before the last report of progress: the time between two reports, without the steps."""
    if len(run.progress) < 2:
        return 0.0
    (before, began), (last, ended) = run.progress[-2:]
    between = [row for row in rows if before < row["step"] <= last]
    return max(0.0, ended - began - sum(row[_STEP] for row in between) - total_seconds(between))


def _calls(run: MeasuredRun) -> list[dict[str, float]]:
    file = run.out / GENERATION_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def _mean_rate(run: MeasuredRun) -> tuple[float | None, float | None]:
    """Tokens per second of the engine's calls, and tokens per response; without the first call if there are more."""
    calls = _calls(run)
    calls = calls[1:] or calls
    seconds, tokens, responses = (sum(call[name] for call in calls) for name in ("seconds", "tokens", "responses"))
    return (tokens / seconds, tokens / responses) if seconds and responses else (None, None)


def _mfu(rows: Sequence[MetricRow], device: Mapping[str, Any]) -> float | None:
    known, speed = _mean(rows, "perf/mfu"), _mean(rows, "perf/model_tflops")
    if known is not None or speed is None or "peak_flops" not in device:
        return known
    return speed * _TERA / device["peak_flops"]


def _peak_words(device: Mapping[str, Any]) -> str:
    if "peak_flops" not in device:
        return ""
    return f"{device['peak_flops'] / _TERA:.3g} TFLOP/s of {device['name']}: {device['peak_source']}"


def _memory(run: MeasuredRun, rows: Sequence[MetricRow]) -> dict[str, float]:
    found = dict(run.facts(MEMORY_FILE))
    for title, name in (("stage", "perf/peak_memory_gib"), ("torch on the GPU", "perf/peak_gpu_memory_gib")):
        peak = max((row[name] for row in rows if name in row), default=None)
        if peak is not None and not (title == "stage" and found):
            found[title] = peak
    return found


def _response_words(pace: Pace | None, mean: float | None) -> str:
    return "" if pace is None or mean is None else f"{pace.words} ({mean:.0f} tokens each in the measurement)"


def _mean(rows: Sequence[MetricRow], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None
