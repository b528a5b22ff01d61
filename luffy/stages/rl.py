"""Mixed-policy reinforcement learning: rollouts and demonstrations in one group, one objective over both.

Run: python -m luffy.stages.rl --config DIR/config.yaml --out DIR
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from luffy.config.settings import RLSettings
from luffy.data.parquet import read_prompts
from luffy.data.templates import decode, encode_traces, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.rollout.collector import Demonstration, GroupCollector, RolloutTask
from luffy.rollout.engine import SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.seeds import derive_seed
from luffy.stages.continuation import adopt_shorter_run
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.rollout_samples import sample_rollouts
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.tracking.rollout_metrics import rollout_metrics
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout
from luffy.tracking.tracker import Tracker
from luffy.training.base_model import copy_tokenizer
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy, check_fits, load_causal_lm
from luffy.training.rl_update import learn
from luffy.training.sampler import batch_indices
from luffy.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Components:
    """What an RL step is made of."""

    policy: Policy
    tasks: Sequence[RolloutTask]
    collector: GroupCollector
    journal: RolloutJournal
    pad_id: int
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """The given number of rollouts, as text."""


def run(settings: RLSettings, context: StageContext) -> StageResult:
    """Train the upstream model; every step's groups are journalled before the update that uses them."""
    rl = settings.rl
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out)
    checkpoints = CheckpointStore(context.out, context.execution.checkpoint.keep)
    start = checkpoints.newest() or 0
    with ExitStack() as stack:
        parts = _open(settings, context, stack)
        if start:
            checkpoints.load(parts.policy.engine, start)
        tracker = stack.enter_context(
            Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=start)
        )
        for step in range(start + 1, rl.steps + 1):
            began = time.perf_counter()
            torch.manual_seed(derive_seed(settings.seed, "train", step))  # for models with dropout
            groups = parts.journal.read(step) or _roll_out(settings, context, parts, step)
            metrics = rollout_metrics(groups)
            metrics |= learn(parts.policy, groups, settings.objective, rl, step, parts.pad_id)
            metrics |= _speed(groups, time.perf_counter() - began)
            tracker.log(step, metrics)
            if step % context.tracking.samples_every == 0 or step == 1:
                tracker.samples(step, parts.read(groups, context.tracking.num_samples))
            if step % context.execution.checkpoint.rl_every == 0 or step == rl.steps:
                checkpoints.save(parts.policy.engine, step)
            _announce(context, step, rl.steps, metrics)
        parts.policy.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    last = read_metrics(context.out / METRICS_FILE)[-1]
    headline = {name: last[name] for name in ("reward/mean", "actor/loss")}
    return StageResult(("model", METRICS_FILE, SAMPLES_FILE), headline, resumed_from=start)


def _open(settings: RLSettings, context: StageContext, stack: ExitStack) -> Components:
    rl, execution = settings.rl, context.execution
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    tasks = tokenize_tasks(tokenizer, read_prompts(context.inputs["data"] / "train.parquet"))
    if not tasks:
        raise DataError("data.train: no prompts are left; see data_card.md for why rows were rejected")
    if rl.prompts_per_step > len(tasks):
        raise DataError(
            f"rl.prompts_per_step is {rl.prompts_per_step} but only {len(tasks)} training prompts are left; "
            "lower it or add prompts"
        )
    model = load_causal_lm(context.inputs["model"] / "model", settings.dtype)
    check_fits(model, max(len(task.prompt_ids) for task in tasks) + rl.max_response_tokens, "a prompt and its response")
    opener = prompt_opener(tokenizer)

    def prompt(ids: Sequence[int]) -> str:
        return decode(tokenizer, ids)

    def reply(ids: Sequence[int]) -> str:
        return opener + decode(tokenizer, ids)

    return Components(
        policy=Policy(model, rl.optimizer, execution, settings.dtype, rl.temperature),
        tasks=tasks,
        collector=GroupCollector(
            grader=stack.enter_context(GraderPool(execution.grader_workers, settings.grading.timeout_s)),
            decode=reply,
            params=SamplingParams(rl.temperature, rl.max_response_tokens, stop_token_ids(tokenizer)),
            group=settings.objective.group,
            seed=settings.seed,
        ),
        journal=RolloutJournal(context.out / "journal"),
        pad_id=tokenizer.pad_token_id,
        read=lambda groups, count: sample_rollouts(groups, settings.objective, count, prompt, reply),
    )


def tokenize_tasks(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> list[RolloutTask]:
    """Prompts and their traces in tokens."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    trace_ids = iter(encode_traces(tokenizer, [trace.text for prompt in prompts for trace in prompt.traces]))
    return [
        RolloutTask(
            uid=prompt.uid,
            prompt_ids=tuple(ids),
            ground_truth=prompt.ground_truth,
            demonstrations=tuple(
                Demonstration(trace.text, tuple(next(trace_ids)), trace.logprobs) for trace in prompt.traces
            ),
        )
        for prompt, ids in zip(prompts, prompt_ids, strict=True)
    ]


def _roll_out(settings: RLSettings, context: StageContext, parts: Components, step: int) -> list[Group]:
    """Generate and grade the groups of `step` with the present weights, and make them durable."""
    indices = batch_indices(len(parts.tasks), settings.rl.prompts_per_step, step - 1, settings.seed)
    with parts.policy.inference_model() as model:
        engine = TransformersEngine(model, context.execution.rollout_batch_size, weight_version=step - 1)
        groups = parts.collector.collect(engine, [parts.tasks[i] for i in indices], step)
    parts.journal.commit(step, groups)
    return groups


def _speed(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for group in groups for row in group.trajectories)
    return {"perf/step_s": seconds, "perf/tokens_per_s": tokens / seconds}


def _announce(context: StageContext, step: int, total: int, metrics: dict[str, float]) -> None:
    context.events.progress(
        step,
        total,
        loss=metrics["actor/loss"],
        reward=metrics["reward/mean"],
        tokens_per_s=metrics["perf/tokens_per_s"],
    )


if __name__ == "__main__":
    main("rl", run)
