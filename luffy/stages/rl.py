"""Mixed-policy reinforcement learning: rollouts and demonstrations in one group, one objective over both.

Run: python -m luffy.stages.rl --config DIR/config.yaml --out DIR
Ask: python -m luffy.stages.rl --explain exp_configs/arithmetic.yaml
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from luffy.config.settings import RLSettings
from luffy.config.training import RLConfig
from luffy.data.parquet import read_prompts
from luffy.data.templates import decode, encode_traces, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.errors import DataError
from luffy.grading.pool import GraderPool
from luffy.rollout.collector import GroupCollector
from luffy.rollout.engine import SamplingParams
from luffy.rollout.tasks import Demonstration, RolloutTask
from luffy.seeds import derive_seed
from luffy.stages.continuation import adopt_shorter_run
from luffy.stages.experience import Experience, Sources
from luffy.stages.explain import explain_if_asked
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.rollout_samples import sample_rollouts
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import METRICS_FILE, read_metrics
from luffy.tracking.rollout_metrics import rollout_metrics
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout
from luffy.tracking.tracker import Tracker
from luffy.training.base_model import copy_tokenizer
from luffy.training.checkpoint import CheckpointStore
from luffy.training.critic import Critic
from luffy.training.frozen_policy import FrozenPolicy
from luffy.training.learner import Learner
from luffy.training.policy import Policy, check_fits, load_causal_lm
from luffy.types import Group, Prompt

_HEADLINE = ("reward/mean", "actor/loss")


@dataclass(frozen=True, slots=True)
class Components:
    """What an RL step is made of."""

    experience: Experience
    learner: Learner
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """The given number of rollouts, as text."""

    @property
    def engines(self) -> dict[str, deepspeed.DeepSpeedEngine]:
        """What a checkpoint holds."""
        critic = self.learner.critic
        return {"policy": self.learner.policy.engine} | ({} if critic is None else {"critic": critic.engine})

    def state(self) -> dict[str, object]:
        """What a checkpoint holds besides."""
        return {"learner": self.learner.state(), "experience": self.experience.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint."""
        self.learner.restore(state["learner"])
        self.experience.restore(state["experience"])


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
            parts.restore(checkpoints.load(parts.engines, start))
        tracker = stack.enter_context(
            Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=start)
        )
        for step in range(start + 1, rl.steps + 1):
            began = time.perf_counter()
            torch.manual_seed(derive_seed(settings.seed, "train", step))  # for models with dropout
            groups, kept, metrics = _step(parts, step)
            metrics |= _speed(groups, time.perf_counter() - began)
            tracker.log(step, metrics)
            if step % context.tracking.samples_every == 0 or step == 1:
                tracker.samples(step, parts.read(kept or groups, context.tracking.num_samples))
            if step % context.execution.checkpoint.rl_every == 0 or step == rl.steps:
                checkpoints.save(parts.engines, step, parts.state())
            _announce(context, step, rl.steps, metrics)
        parts.learner.policy.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    last = read_metrics(context.out / METRICS_FILE)[-1]
    headline = {name: last[name] for name in _HEADLINE if name in last}
    return StageResult(("model", METRICS_FILE, SAMPLES_FILE), headline, resumed_from=start)


def _step(parts: Components, step: int) -> tuple[list[Group], list[Group], dict[str, float]]:
    """One RL step; returns all its groups, those it learned from, and its metrics."""
    groups = parts.experience.groups(parts.learner.policy, step)
    kept = parts.experience.kept(groups)
    metrics = rollout_metrics(groups, replays=parts.experience.replays) | {"batch/kept_share": len(kept) / len(groups)}
    metrics |= parts.learner.learn(kept, step)
    parts.experience.observe(step, groups)
    hard = parts.experience.hard_demonstrations(step)
    if hard is not None:
        metrics |= parts.learner.imitate(hard, step)
    return groups, kept, metrics


def _open(settings: RLSettings, context: StageContext, stack: ExitStack) -> Components:
    tokenizer = load_tokenizer(context.inputs["model"] / "model")
    tasks = _tasks(settings, context, tokenizer)
    learner = _learner(settings, context, _longest(tasks, settings.rl), tokenizer.pad_token_id)
    opener = prompt_opener(tokenizer)

    def prompt(ids: Sequence[int]) -> str:
        return decode(tokenizer, ids)

    def reply(ids: Sequence[int]) -> str:
        return opener + decode(tokenizer, ids)

    collector = GroupCollector(
        grader=stack.enter_context(GraderPool(context.execution.grader_workers, settings.grading.timeout_s)),
        decode=reply,
        params=SamplingParams(settings.rl.temperature, settings.rl.max_response_tokens, stop_token_ids(tokenizer)),
        group=settings.objective.group,
        total_steps=settings.rl.steps,
        seed=settings.seed,
    )
    journal = RolloutJournal(context.out / "journal")
    sources = Sources(tasks, collector, journal, context.execution.rollout_batch_size, tokenizer.pad_token_id)
    return Components(
        experience=Experience(settings, sources),
        learner=learner,
        read=lambda groups, count: sample_rollouts(groups, settings.objective.advantage, count, prompt, reply),
    )


def _tasks(settings: RLSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase) -> Sequence[RolloutTask]:
    tasks = tokenize_tasks(tokenizer, read_prompts(context.inputs["data"] / "train.parquet"))
    if not tasks:
        raise DataError("data.train: no prompts are left; see data_card.md for why rows were rejected")
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


def _learner(settings: RLSettings, context: StageContext, longest: int, pad_id: int) -> Learner:
    """The policy and, where the objective asks for them, its critic and the frozen policy it started from."""
    rl, execution, objective = settings.rl, context.execution, settings.objective

    def start() -> PreTrainedModel:
        return load_causal_lm(context.inputs["model"] / "model", settings.dtype)

    model = start()
    check_fits(model, longest, "a prompt and its response")
    return Learner(
        policy=Policy(model, rl.optimizer, execution, settings.dtype, rl.temperature),
        objective=objective,
        rl=rl,
        pad_id=pad_id,
        critic=None if rl.critic is None else Critic(start(), rl.critic, execution, settings.dtype),
        reference=FrozenPolicy(start(), execution, rl.temperature) if objective.needs_reference else None,
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


def _speed(groups: Sequence[Group], seconds: float) -> dict[str, float]:
    tokens = sum(len(row.prompt_ids) + len(row.response_ids) for group in groups for row in group.trajectories)
    return {"perf/step_s": seconds, "perf/tokens_per_s": tokens / seconds}


def _announce(context: StageContext, step: int, total: int, metrics: dict[str, float]) -> None:
    shown = {"loss": "actor/loss", "reward": "reward/mean", "tokens_per_s": "perf/tokens_per_s"}
    # A step whose groups were all dropped has no loss.
    context.events.progress(step, total, **{key: metrics[name] for key, name in shown.items() if name in metrics})


if __name__ == "__main__":
    explain_if_asked("rl")
    main("rl", run)
