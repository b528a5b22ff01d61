"""Directories as a finished chain leaves them, with plausible numbers, for what only reads them."""

import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from luffy.config import ExperimentConfig, load_experiment
from luffy.evaluation.results import EvaluationResults, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, write_sample_records
from luffy.tracking.metrics import StepLines, metric_line
from luffy.tracking.tracker import SampleRollout
from synthetic.finished_stages import write_finished
from synthetic.result_rows import result_row, sample_record

SKILL = {
    "base": {"in_distribution": 0.12, "longer": 0.04, "other_mix": 0.10, "retention": 0.985},
    "sft": {"in_distribution": 0.42, "longer": 0.21, "other_mix": 0.30, "retention": 0.955},
    "rl": {"in_distribution": 0.79, "longer": 0.52, "other_mix": 0.41, "retention": 0.94},
}
SUBJECTS = ("carrying", "a < b & *c*", "reversal")
HOSTILE = "<script>alert(1)</script> & <b>bold</b> ``` |"
"""Model output that must never become markup."""


def write_chain(root: Path, num_problems: int = 100, num_steps: int = 200) -> tuple[ExperimentConfig, dict[str, Path]]:
    """Write all upstream stages of a report; returns the experiment and the report's inputs."""
    config = load_experiment(
        Path("exp_configs/smoke.yaml"), ["name=arithmetic", "evaluation.decodings.sampled.num_samples=4"]
    )
    inputs = {name: root / name for name in ("data", "base", "sft", "rl", *(f"evaluate_{name}" for name in SKILL))}
    for directory in inputs.values():
        directory.mkdir(parents=True)
    _write_data(inputs["data"])
    _write_curves(inputs["base"], 1500, _supervised)
    _write_curves(inputs["sft"], 48, _supervised)
    _write_curves(inputs["rl"], num_steps, _reinforced)
    _write_rollouts(inputs["rl"], num_steps)
    for checkpoint in SKILL:
        _write_evaluation(inputs[f"evaluate_{checkpoint}"], checkpoint, config, num_problems)
    for position, (name, directory) in enumerate(inputs.items()):
        _finish(directory, "prepare_data" if name == "data" else name, position)
    return config, inputs


def _write_data(directory: Path) -> None:
    def source(rows: int, traces: int, rejected: Mapping[str, int]) -> dict[str, object]:
        return {
            "kind": "arithmetic", "rows_in": rows + sum(rejected.values()), "rows_out": rows, "quarantined": 0,
            "malformed": {}, "rejected": rejected, "rejected_traces": {}, "traces_out": traces,
            "prompt_tokens": {"p50": 17, "max": 26},
            "trace_tokens": {"p50": 41, "max": 62} if traces else {},
        }  # fmt: skip

    sources = {"train": source(500, 500, {"prompt_in_a_suite": 9, "trace_too_long": 3})}
    sources |= {f"suites.{name}": source(200, 0, {}) for name in SKILL["base"]}
    (directory / "card.json").write_text(json.dumps({"vocabulary_size": 43, "sources": sources}))


def _write_curves(directory: Path, steps: int, metrics: Callable[[float, random.Random], dict[str, float]]) -> None:
    noise = random.Random(directory.name)
    writer = StepLines(directory / "metrics.jsonl")
    if metrics is _reinforced:
        writer.append(metric_line(0, _held_out(0.0)))
    for step in range(1, steps + 1):
        writer.append(metric_line(step, metrics(step / steps, noise)))
    writer.close()
    (directory / "model").mkdir()
    (directory / "model" / "model.safetensors").write_bytes(b"\0" * 1_500_000)


def _supervised(progress: float, noise: random.Random) -> dict[str, float]:
    names = ("actor/loss", "actor/grad_norm", "actor/lr", "perf/tokens_per_s")
    return {name: noise.uniform(0.2, 0.4) for name in names}


_MEASURED = {
    "actor": "loss on_policy_loss off_policy_loss entropy_loss entropy_on_policy entropy_off_policy on_policy_prob "
    "off_policy_prob grad_norm lr off_policy_weight_mean",
    "batch": "solve_none solve_all zero_advantage_share off_policy_token_share",
    "rollout": "response_length_mean off_policy_length_mean truncated_share logp_gap_mean",
    "perf": "tokens_per_s step_s",
}


def _reinforced(progress: float, noise: random.Random) -> dict[str, float]:
    reward = min(1.0, max(0.0, 0.38 + 0.42 * (1 - math.exp(-4 * progress)) + noise.gauss(0, 0.05)))
    names = (f"{namespace}/{name}" for namespace, each in _MEASURED.items() for name in each.split())
    metrics = {name: noise.uniform(0.2, 0.4) for name in names}
    metrics |= {"reward/mean": reward, "batch/on_reward": reward, "batch/off_reward": 1.0}
    shares = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "unparsable": 0.0, "timed_out": 0.0, "crashed": 0.0}
    lost = {"correct": -1.0, "wrong": 0.7, "no_answer": 0.2, "unparsable": 0.1}
    metrics |= {f"reward/{name}_share": share + lost.get(name, 0) * (1 - reward) for name, share in shares.items()}
    return metrics | (_held_out(progress) if progress * 4 in (1, 2, 3, 4) else {})


def _held_out(progress: float) -> dict[str, float]:
    """A validation, which RL has every quarter of its steps."""
    accuracy = 0.3 + 0.4 * progress
    of_suite = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
    return {"val/accuracy": accuracy} | {f"val/longer/{name}": value for name, value in of_suite.items()}


def _write_rollouts(directory: Path, steps: int) -> None:
    writer = StepLines(directory / "samples.jsonl")
    for step in (1, steps // 2, steps):
        good = "<think>47 + 25 = 72\nreverse 72 = 27\n27 - 9 = 18</think>\\boxed{18}"
        wrong, right = ("\\boxed{63}", "on_policy", 0.0, "wrong", -0.25), (good, "on_policy", 1.0, "correct", 0.125)
        rows = [
            SampleRollout("a1", "47 +25 rev -9", *(wrong if step == 1 else right)),
            SampleRollout("a2", "11 rev +80", f"<think>{HOSTILE}", "on_policy", 0.0, "no_answer", -0.25),
            SampleRollout("a1", "47 +25 rev -9", good, "off_policy", 1.0, "correct", 0.75, reference="18"),
        ]
        for row in rows:
            writer.append({"step": step, **asdict(row)})
    writer.close()


def _write_evaluation(directory: Path, checkpoint: str, config: ExperimentConfig, num_problems: int) -> None:
    assert config.evaluation is not None
    rows, saved = [], []
    for decoding, how in config.evaluation.decodings.items():
        for suite in config.data.suites:
            difficulty = random.Random(suite)
            luck = random.Random(checkpoint + decoding + suite)
            skill = SKILL[checkpoint][suite]
            records = []
            for problem in range(num_problems):
                ease = difficulty.betavariate(1.5, 1.5) - 0.5
                chance = min(1.0, max(0.0, skill + ease * min(skill, 1 - skill)))
                records += [
                    _record(suite, decoding, problem, sample, chance, luck) for sample in range(how.num_samples)
                ]
            rows.append(result_row(records, config.evaluation.confidence))
            saved += records
    write_sample_records(directory / SAMPLES_FILE, saved)
    write_results(
        directory / "results.json",
        EvaluationResults(checkpoint=checkpoint, confidence=config.evaluation.confidence, rows=tuple(rows)),
    )


def _record(suite: str, decoding: str, problem: int, sample: int, chance: float, luck: random.Random) -> SampleRecord:
    correct = luck.random() < chance
    outcome = "correct" if correct else luck.choices(("wrong", "no_answer", "unparsable"), (8, 3, 1))[0]
    return sample_record(
        suite,
        f"p{problem}",
        correct,
        decoding=decoding,
        sample=sample,
        outcome=outcome,
        finish_reason="length" if outcome == "no_answer" else "stop",
        num_tokens=luck.randint(12, 60),
        grader="math",
        subject=SUBJECTS[problem % len(SUBJECTS)],
        level=str(1 + problem % 2) if suite == "longer" else None,
    )


def _finish(directory: Path, node: str, position: int) -> None:
    seconds = {"base": 193, "rl": 141, "sft": 12}.get(node, 9)
    write_finished(
        directory,
        node.partition("_")[0] if node.startswith("evaluate") else node,
        node,
        f"{position:02d}f3a9c1d2e4b5a6"[:16],
        [path.name for path in sorted(directory.iterdir())],
        versions={"python": "3.11.9", "torch": "2.13.0", "deepspeed": "0.19.8", "commit": "0123456789ab"},
        hardware={"host": "bench", "cpu": "AMD EPYC 7763 64-Core Processor", "cpu_cores": "2", "memory_gib": "8"},
        started=f"2026-03-04T10:{position:02d}:00+00:00",
        ended=f"2026-03-04T10:{position + seconds // 60:02d}:{seconds % 60:02d}+00:00",
        resumed_from=100 if node == "rl" else 0,
    )
