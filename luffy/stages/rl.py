"""Mixed-policy reinforcement learning: rollouts and demonstrations in one group, one objective over both.

Run: python -m luffy.stages.rl --config DIR/config.yaml --out DIR
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from luffy.cluster.protocol import Cluster
from luffy.cluster.rl_cluster import open_cluster
from luffy.config.environment import History, history_of
from luffy.config.rl_teacher import SelfTeacher, ServedTeacher
from luffy.config.settings import RLSettings
from luffy.config.training import RLConfig
from luffy.data.confidential_prompts import confidential_uids
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts
from luffy.data.pass_rates import RATES_FILE, read_pass_rates
from luffy.data.same_tokenizer import is_same_tokenizer
from luffy.data.templates import decode, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.players import open_player
from luffy.errors import DataError
from luffy.grading import JUDGE_CACHE, Grader, GraderPool, problem_of
from luffy.grading.judge import Judges
from luffy.pipeline.chain.checkpoints import complete_checkpoints
from luffy.rl.collector import GroupCollector
from luffy.rl.hints import HintedPrompts
from luffy.rl.logp_gap import check_logp_gap
from luffy.rl.rollout_samples import sample_rollouts
from luffy.rl.served_teacher import ServedTeaching
from luffy.rl.step_runner import RowTeacher, StepRunner
from luffy.rl.tasks import Demonstration, RolloutTask
from luffy.rl.teacher_prompts import TeacherPrompts
from luffy.rollout.engine import RolloutEngine, SamplingParams
from luffy.rollout.stop_texts import StopTexts
from luffy.stages.continuation import adopt_shorter_run
from luffy.stages.program import StageContext, StageResult, main
from luffy.stages.unmeasured import HeldOutMeasure, Unmeasured, end_of_training
from luffy.stop_request import StoppedOnRequest, stop_is_requested
from luffy.tracking.gpu_hours import GpuHours
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.metrics import METRICS_FILE, metrics_until, read_metrics
from luffy.tracking.samples import SAMPLES_FILE, SampleRollout
from luffy.tracking.token_budget import TokenBudget
from luffy.tracking.tracker import Tracker
from luffy.tracking.unanswered import advice_on_rollouts
from luffy.training.base_model import copy_tokenizer, model_folder
from luffy.training.trainer import TeacherSpec, Trainer, TrainerSpec
from luffy.types import Group, Message, Prompt

if TYPE_CHECKING:  # imported where there is a validation, since it loads all of an evaluation
    from luffy.stages.held_out import HeldOutProblems

_HEADLINE = ("reward/mean", "actor/loss")
_PROMPTS = {"train": "train.parquet", "complement": "rl_complement.parquet"}
"""Files of `RLSettings.prompts`."""
_NONE_LEFT = {
    "train": "data.train: no prompts are left; see card.md for why rows were rejected",
    "complement": (
        "data.rl: the complement is empty, for every training prompt has a trace that SFT gets; lower "
        "data.sft.unique_train_examples, or use train"
    ),
}


def _plain_cluster(cluster: Cluster) -> Cluster:
    return cluster


def _plain_grader(grader: Grader) -> Grader:
    return grader


def _plain_engine(engine: RolloutEngine) -> RolloutEngine:
    return engine


@dataclass(frozen=True, slots=True)
class Wrapping:
    """Wrappers of parts of the stage, through which `luffy bench` sets lengths and verdicts; a run has none."""

    cluster: Callable[[Cluster], Cluster] = field(default=_plain_cluster)
    grader: Callable[[Grader], Grader] = field(default=_plain_grader)
    validation_engine: Callable[[RolloutEngine], RolloutEngine] = field(default=_plain_engine)


_UNWRAPPED = Wrapping()


@dataclass(frozen=True, slots=True)
class Components:
    """The objects that the RL loop needs."""

    steps: StepRunner
    trainer: Trainer
    held_out: HeldOutMeasure
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """Returns the given number of rollouts as text."""


def run(settings: RLSettings, context: StageContext, wrapping: Wrapping = _UNWRAPPED) -> StageResult:
    """Train the upstream model; every step's groups are journalled before the update that uses them."""
    rl = settings.rl
    if context.extends is not None:
        adopt_shorter_run(context.extends, context.out, ("journal",))
    hours = GpuHours(context.out)
    start = max(complete_checkpoints(context.out), default=0)
    _warn_of_uncorrected_staleness(settings, context)
    with ExitStack() as stack:
        parts = _open(settings, context, stack, wrapping)
        if start:
            parts.steps.restore(start)
        tracker = stack.enter_context(
            Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=start)
        )
        if not start and (measured := parts.held_out.measure(0)):
            tracker.log(0, measured)
        budget = TokenBudget(rl.max_tokens, metrics_until(context.out / METRICS_FILE, start))
        for step in range(start + 1, rl.steps + 1):
            if (ended_by := end_of_training(parts.held_out, budget)) is not None:
                context.events.message(f"rl.{ended_by}: step {step - 1} of {rl.steps} was the last")
                break
            outcome = parts.steps.run(step)
            budget.count(outcome.metrics)
            measured = parts.held_out.measure(step, last=budget.is_over)
            tracker.log(step, outcome.metrics | measured | hours.metrics(parts.trainer.num_gpus))
            check_logp_gap(outcome.metrics, context.execution.max_logp_gap, rl.max_staleness)
            if step % context.tracking.samples_every == 0 or step == 1:
                tracker.samples(step, parts.read(outcome.groups, context.tracking.num_samples))
            is_last = step == rl.steps or end_of_training(parts.held_out, budget) is not None
            is_due = is_last or step % context.execution.checkpoint.rl_every == 0
            is_stopped = stop_is_requested()
            if is_due or is_stopped:
                parts.steps.save(step, is_extra=not is_due)
            _announce(context, step, rl.steps, outcome.metrics)
            if is_stopped and not is_last:
                raise StoppedOnRequest(f"step {step} of {rl.steps} is saved")
        parts.held_out.export(context.out / "model")
    copy_tokenizer(context.inputs["data"] / "tokenizer", context.out / "model")
    metrics = read_metrics(context.out / METRICS_FILE)
    if (advice := advice_on_rollouts(metrics)) is not None:
        context.events.message(advice)
    headline = {name: metrics[-1][name] for name in _HEADLINE if name in metrics[-1]}
    return StageResult(("model", METRICS_FILE, SAMPLES_FILE), headline, resumed_from=start)


def _warn_of_uncorrected_staleness(settings: RLSettings, context: StageContext) -> None:
    uncorrected = [term.name for term in settings.objective.terms if term.takes_sampler_for_trainer]
    if settings.rl.max_staleness and uncorrected:
        context.events.message(
            f"rl.max_staleness is {settings.rl.max_staleness}, but {', '.join(uncorrected)} would learn as if the "
            "current weights had sampled every token; set rl.correction or a loss that uses "
            "the sampler's probabilities (aipo)"
        )


def _open(settings: RLSettings, context: StageContext, stack: ExitStack, wrapping: Wrapping) -> Components:
    model = context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    tasks = _tasks(settings, context, tokenizer)
    problems = _held_out_problems(settings, context, tokenizer)
    hints = _hints(settings, tokenizer)
    longest = max(_longest(tasks, settings.rl, hints), 0 if problems is None else problems.longest)
    shown = _teacher_prompts(settings, context, tokenizer)
    longest_shown = longest if shown is None else shown.longest + settings.rl.max_response_tokens
    teaching: RowTeacher | None = shown
    if isinstance(settings.rl.teacher, ServedTeacher):  # before the models are loaded: it may not be there
        where = context.execution.rl_teacher
        served = ServedTeaching.connect(settings.rl.teacher, where, tasks, tokenizer, longest)
        teaching = stack.enter_context(closing(served))
    teacher = _teacher(settings, model, tokenizer, longest_shown)
    spec = TrainerSpec(settings, context.execution, model, context.out, longest, tokenizer.pad_token_id, teacher)
    cluster = stack.enter_context(wrapping.cluster(open_cluster(spec)))
    opener = prompt_opener(tokenizer)

    def prompt(ids: Sequence[int]) -> str:
        return decode(tokenizer, ids)

    rl = settings.rl
    stops = StopTexts(rl.stop, prompt)

    def reply(ids: Sequence[int]) -> str:
        return opener + stops.text(ids)

    own_graders = () if settings.validation is None else settings.validation.protocol.own_graders
    graders = stack.enter_context(
        GraderPool.configured(
            context.execution.grader_workers, settings.grading, context.out / JUDGE_CACHE, own_graders
        )
    )
    judges = stack.enter_context(closing(Judges(context.out / JUDGE_CACHE)))
    collector = GroupCollector(
        grader=wrapping.grader(graders),
        decode=reply,
        params=SamplingParams(rl.temperature, rl.max_response_tokens, stop_token_ids(tokenizer), stop=rl.stop),
        group=settings.objective.group,
        total_steps=settings.rl.steps,
        seed=settings.seed,
        player=_player(settings, tokenizer, judges),
        stops=stops if rl.stop else None,
        hints=hints,
    )
    confidential = confidential_uids(context.inputs["data"] / _PROMPTS[settings.prompts])

    def read(groups: Sequence[Group], count: int) -> list[SampleRollout]:
        return sample_rollouts(groups, settings.objective.advantage, count, prompt, reply, confidential)

    journal = RolloutJournal(context.out / "journal")
    return Components(
        steps=stack.enter_context(StepRunner(settings, cluster, tasks, collector, journal, teaching)),
        trainer=cluster.trainer,
        held_out=_held_out(settings, context, problems, cluster, graders, judges, tokenizer, wrapping),
        read=read,
    )


def _held_out_problems(
    settings: RLSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase
) -> "HeldOutProblems | None":
    if settings.validation is None:
        return None
    from luffy.stages.held_out import read_problems

    model = context.inputs["model"] / "model"
    return read_problems(settings.validation, context.inputs["held_out"], model, tokenizer)


def _held_out(
    settings: RLSettings,
    context: StageContext,
    problems: "HeldOutProblems | None",
    cluster: Cluster,
    graders: GraderPool,
    judges: Judges,
    tokenizer: PreTrainedTokenizerBase,
    wrapping: Wrapping,
) -> HeldOutMeasure:
    """The validation, sampled by the cluster's engine with the current weights."""
    if problems is None:
        return Unmeasured(cluster.trainer.export)
    from luffy.stages.held_out import open_for_rl

    def engine_at(step: int) -> RolloutEngine:
        # With staleness, rollouts of later steps run on beside: they take these weights now or at the next step.
        cluster.publish(step)
        return wrapping.validation_engine(cluster.engine)

    return open_for_rl(settings, context, problems, engine_at, cluster.trainer.export, graders, judges, tokenizer)


def _player(settings: RLSettings, tokenizer: PreTrainedTokenizerBase, judges: Judges) -> EpisodePlayer | None:
    """Plays the episodes of `environment`; None: a response is a single turn."""
    if settings.environment is None:
        return None
    return open_player(settings.environment, tokenizer, settings.lanes, judges)


def _tasks(settings: RLSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase) -> Sequence[RolloutTask]:
    prompts = read_prompts(context.inputs["data"] / _PROMPTS[settings.prompts])
    tasks = tokenize_tasks(tokenizer, prompts, history_of(settings.environment))
    rates = read_pass_rates(context.inputs["data"] / RATES_FILE)
    tasks = [replace(task, pass_rate=rates.get(task.uid)) for task in tasks]
    if not tasks:
        raise DataError(_NONE_LEFT[settings.prompts])
    _check_buffer_fills(settings, tasks)
    if settings.rl.prompts_per_step > len(tasks):
        which = "prompts of the complement" if settings.prompts == "complement" else "training prompts"
        raise DataError(
            f"rl.prompts_per_step is {settings.rl.prompts_per_step} but only {len(tasks)} {which} are left; lower it "
            "or add prompts"
        )
    return tasks


def _check_buffer_fills(settings: RLSettings, tasks: Sequence[RolloutTask]) -> None:
    config = settings.objective.interleaved_sft
    with_traces = sum(bool(task.demonstrations) for task in tasks)
    if config is not None and config.buffer_size > with_traces:
        raise DataError(
            f"objective.interleaved_sft.buffer_size is {config.buffer_size} but only {with_traces} training prompts "
            "have a trace: it could never fill up; lower it"
        )


def _hints(settings: RLSettings, tokenizer: PreTrainedTokenizerBase) -> HintedPrompts | None:
    config = settings.objective.group.hint
    if config is None:
        return None

    def encode(messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(render_prompts(tokenizer, [messages])[0])

    return HintedPrompts(config, encode, settings.seed, settings.rl.steps)


def _teacher_prompts(
    settings: RLSettings, context: StageContext, tokenizer: PreTrainedTokenizerBase
) -> TeacherPrompts | None:
    """What the policy is shown as its own teacher; None: it is not."""
    config = settings.rl.teacher
    if not isinstance(config, SelfTeacher):
        return None
    return TeacherPrompts(tokenizer, read_prompts(context.inputs["data"] / _PROMPTS[settings.prompts]), config)


def _teacher(settings: RLSettings, model: Path, tokenizer: PreTrainedTokenizerBase, longest: int) -> TeacherSpec | None:
    """Where the teacher is, None where it is served; DataError where its tokens are not the policy's."""
    config = settings.rl.teacher
    if config is None or isinstance(config, ServedTeacher):
        return None
    if isinstance(config, SelfTeacher):
        return TeacherSpec(model, longest)
    folder = model_folder(config.path)
    if not is_same_tokenizer(load_tokenizer(folder), tokenizer):
        raise DataError(
            f"rl.teacher.path: the tokenizer of {config.path} is not the policy's, so it cannot score the policy's "
            "tokens; take a teacher of the same family, or let it write traces instead (section synthesize)"
        )
    return TeacherSpec(folder, longest)


def _longest(tasks: Sequence[RolloutTask], rl: RLConfig, hints: HintedPrompts | None) -> int:
    longest = max(len(task.prompt_ids) for task in tasks)
    return max(longest, 0 if hints is None else hints.longest(tasks)) + rl.max_response_tokens


def tokenize_tasks(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], history: History = "exact"
) -> list[RolloutTask]:
    """Tokenized prompts and traces."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    encoded = encode_demonstrations(tokenizer, prompts, history)
    return [
        RolloutTask(
            uid=prompt.uid,
            prompt_ids=tuple(ids),
            ground_truth=prompt.ground_truth,
            demonstrations=tuple(
                Demonstration(trace.reply, turns.token_ids, trace.logprobs, turns.source, turns.context_starts)
                for trace, turns in zip(prompt.traces, of_prompt, strict=True)
            ),
            problem=problem_of(prompt),
            messages=prompt.messages,
        )
        for prompt, ids, of_prompt in zip(prompts, prompt_ids, encoded, strict=True)
    ]


def _announce(context: StageContext, step: int, total: int, metrics: dict[str, float]) -> None:
    shown = {"loss": "actor/loss", "reward": "reward/mean", "tokens_per_s": "perf/tokens_per_s"}
    # A step whose groups were all dropped has no loss.
    context.events.progress(step, total, **{key: metrics[name] for key, name in shown.items() if name in metrics})


if __name__ == "__main__":
    main("rl", run, defers_stop_requests=True)
