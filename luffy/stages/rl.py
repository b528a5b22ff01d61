"""Mixed-policy reinforcement learning: rollouts and demonstrations in one group, one objective over both.

Run: python -m luffy.stages.rl --config DIR/config.yaml --out DIR
Ask: python -m luffy.stages.rl --explain exp_configs/arithmetic.yaml
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from luffy.cluster import open_cluster
from luffy.config.settings import RLSettings
from luffy.config.training import RLConfig
from luffy.data.confidential_prompts import confidential_uids
from luffy.data.parquet import read_prompts
from luffy.data.templates import decode, encode_traces, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.errors import DataError
from luffy.grading import JUDGE_CACHE, GraderPool, problem_of
from luffy.pipeline.checkpoints import complete_checkpoints
from luffy.rollout.collector import GroupCollector
from luffy.rollout.engine import SamplingParams
from luffy.rollout.tasks import Demonstration, RolloutTask
from luffy.stages.continuation import adopt_shorter_run
from luffy.stages.experience import Experience, Sources
from luffy.stages.explain import explain_if_asked
from luffy.stages.generation import Generation
from luffy.stages.logp_gap import check_logp_gap
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.rollout_samples import sample_rollouts
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.tracking.rollout_metrics import learned_metrics, rollout_metrics, staleness_metrics
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout
from luffy.tracking.tracker import Tracker
from luffy.training.base_model import copy_tokenizer
from luffy.training.memory_use import peak_memory
from luffy.training.trainer import Trainer, TrainerSpec
from luffy.types import Group, Prompt

_HEADLINE = ("reward/mean", "actor/loss")


@dataclass(frozen=True, slots=True)
class Components:
    """What an RL step is made of."""

    experience: Experience
    generation: Generation
    trainer: Trainer
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """The given number of rollouts, as text."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step leaves to tell."""

    groups: Sequence[Group]
    """Those it learned from; all of them when it learned from none."""
    metrics: dict[str, float]


def run(settings: RLSettings, context: StageContext) -> StageResult:
    """Train the upstream model; every step's groups are journalled before the update that uses them."""
    rl = settings.rl
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out)
    start = max(complete_checkpoints(context.out), default=0)
    _tell_of_staleness(settings, context)
    with ExitStack() as stack:
        parts = _open(settings, context, stack)
        if start:
            parts.experience.restore(parts.trainer.restore(start))
        tracker = stack.enter_context(
            Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=start)
        )
        for step in range(start + 1, rl.steps + 1):
            outcome = _step(parts, step, settings)
            tracker.log(step, outcome.metrics)
            check_logp_gap(outcome.metrics, context.execution.max_logp_gap, rl.max_staleness)
            if step % context.tracking.samples_every == 0 or step == 1:
                tracker.samples(step, parts.read(outcome.groups, context.tracking.num_samples))
            if step % context.execution.checkpoint.rl_every == 0 or step == rl.steps:
                parts.trainer.save(step, parts.experience.state())
            _announce(context, step, rl.steps, outcome.metrics)
        parts.trainer.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    last = read_metrics(context.out / METRICS_FILE)[-1]
    headline = {name: last[name] for name in _HEADLINE if name in last}
    return StageResult(("model", METRICS_FILE, SAMPLES_FILE), headline, resumed_from=start)


def _step(parts: Components, step: int, settings: RLSettings) -> StepOutcome:
    """One RL step: groups in, updates out, and what later steps need is remembered."""
    began = time.perf_counter()
    groups, metrics = parts.generation.take(step)
    kept = parts.experience.kept(step, groups)
    metrics |= rollout_metrics(groups, replays=parts.experience.replays) | {"batch/kept_share": len(kept) / len(groups)}
    metrics |= staleness_metrics(groups, step, settings.rl.max_staleness) | learned_metrics(kept)
    metrics |= parts.trainer.learn(kept, step)
    parts.experience.observe(step, groups)
    hard = parts.experience.hard_demonstrations(step)
    if hard is not None:
        metrics |= parts.trainer.imitate(hard, step)
    speed = _speed(groups, metrics, time.perf_counter() - began, settings.cluster)
    return StepOutcome(kept or groups, metrics | speed)


def _tell_of_staleness(settings: RLSettings, context: StageContext) -> None:
    blind = [term.name for term in settings.objective.terms if term.takes_sampler_for_trainer]
    if settings.rl.max_staleness and blind:
        context.events.message(
            f"rl.max_staleness is {settings.rl.max_staleness}, but {', '.join(blind)} would learn as if the present "
            "weights had drawn every token; give rl.correction or a loss that knows the sampler (aipo)"
        )


def _open(settings: RLSettings, context: StageContext, stack: ExitStack) -> Components:
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    tasks = _tasks(settings, context, tokenizer)
    spec = TrainerSpec(
        settings, context.execution, model, context.out, _longest(tasks, settings.rl), tokenizer.pad_token_id
    )
    cluster = stack.enter_context(open_cluster(spec))
    opener = prompt_opener(tokenizer)

    def prompt(ids: Sequence[int]) -> str:
        return decode(tokenizer, ids)

    def reply(ids: Sequence[int]) -> str:
        return opener + decode(tokenizer, ids)

    collector = GroupCollector(
        grader=stack.enter_context(
            GraderPool.configured(context.execution.grader_workers, settings.grading, context.out / JUDGE_CACHE)
        ),
        decode=reply,
        params=SamplingParams(settings.rl.temperature, settings.rl.max_response_tokens, stop_token_ids(tokenizer)),
        group=settings.objective.group,
        total_steps=settings.rl.steps,
        seed=settings.seed,
    )
    experience = Experience(
        settings, Sources(tasks, collector, RolloutJournal(context.out / "journal"), cluster.trainer)
    )
    confidential = confidential_uids(context.inputs["data"] / "train.parquet")

    def read(groups: Sequence[Group], count: int) -> list[SampleRollout]:
        return sample_rollouts(groups, settings.objective.advantage, count, prompt, reply, confidential)

    return Components(
        experience=experience,
        generation=stack.enter_context(
            Generation(experience, cluster, settings.rl.max_staleness, last_step=settings.rl.steps)
        ),
        trainer=cluster.trainer,
        read=read,
    )


def _tasks(settings: RLSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase) -> Sequence[RolloutTask]:
    tasks = tokenize_tasks(tokenizer, read_prompts(context.inputs["data"] / "train.parquet"))
    if not tasks:
        raise DataError("data.train: no prompts are left; see card.md for why rows were rejected")
    _check_buffer_fills(settings, tasks)
    if settings.rl.prompts_per_step > len(tasks):
        raise DataError(
            f"rl.prompts_per_step is {settings.rl.prompts_per_step} but only {len(tasks)} training prompts are left; "
            "lower it or add prompts"
        )
    return tasks


def _check_buffer_fills(settings: RLSettings, tasks: Sequence[RolloutTask]) -> None:
    config = settings.objective.interleaved_sft
    with_traces = sum(bool(task.demonstrations) for task in tasks)
    if config is not None and config.buffer_size > with_traces:
        raise DataError(
            f"objective.interleaved_sft.buffer_size is {config.buffer_size} but only {with_traces} training prompts "
            "have a trace: it could never fill; lower it"
        )


def _longest(tasks: Sequence[RolloutTask], rl: RLConfig) -> int:
    return max(len(task.prompt_ids) for task in tasks) + rl.max_response_tokens


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
            problem=problem_of(prompt),
        )
        for prompt, ids in zip(prompts, prompt_ids, strict=True)
    ]


def _speed(groups: Sequence[Group], metrics: Mapping[str, float], seconds: float, cluster: str) -> dict[str, float]:
    """Tokens a second of the whole step and of its training part, and the share of it that the trainer waited."""
    rows = [row for group in groups for row in group.trajectories]
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for row in rows)
    return {
        "perf/step_s": seconds,
        "perf/tokens_per_s": tokens / seconds,
        "perf/trainer_idle_share": metrics["perf/trainer_idle_s"] / seconds,
        "perf/train_tokens_per_s": tokens / (seconds - metrics["perf/trainer_idle_s"]),
        **(peak_memory() if cluster == "local" else {}),  # else trainer and engines have processes of their own
    }


def _announce(context: StageContext, step: int, total: int, metrics: dict[str, float]) -> None:
    shown = {"loss": "actor/loss", "reward": "reward/mean", "tokens_per_s": "perf/tokens_per_s"}
    # A step whose groups were all dropped has no loss.
    context.events.progress(step, total, **{key: metrics[name] for key, name in shown.items() if name in metrics})


if __name__ == "__main__":
    explain_if_asked("rl")
    main("rl", run)
