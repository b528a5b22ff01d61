"""Opens the components of the RL loop: tasks, models, engine, graders and collector, from the stage's settings and
inputs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.cluster.local import open_cluster
from luffy.config.environment import History, history_of
from luffy.config.settings import RLSettings
from luffy.config.starts import WholeTrace
from luffy.config.training import ModelTeacher, SelfTeacher, ServedTeacher
from luffy.data.answer_cards import RATES_FILE, read_pass_rates
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts, shown_references
from luffy.data.splits import EMPTY_COMPLEMENT
from luffy.data.templates import (
    decode,
    load_tokenizer,
    prompt_opener,
    prompt_texts,
    render_prompts,
    stop_token_ids,
    text_tokens,
)
from luffy.data.tokenizer import check_scores
from luffy.environments.registry import open_player
from luffy.errors import DataError
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import problem_of
from luffy.model_shape import num_embeddings
from luffy.rl.group_starts import GroupStart, Texts, open_starts
from luffy.rl.groups import GroupCollector, sample_rollouts
from luffy.rl.loop import StepRunner
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.teaching import TeacherPrompts, Teaching, connect_teacher
from luffy.rl.trace_choice import TraceChoice
from luffy.rollout.engine import SamplingParams, StopTexts
from luffy.rollout.vllm_limits import context_length, read_shape
from luffy.stages.held_out import measurer, read_problems
from luffy.stages.program import StageContext
from luffy.stages.training_span import HeldOut
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.tracker import SampleRollout
from luffy.training.learner import TeacherSpec, Trainer, TrainerSpec
from luffy.training.model_folder import model_folder
from luffy.types import Group, Message, Prompt


@dataclass(frozen=True, slots=True)
class RLComponents:
    """The objects that the RL loop needs."""

    steps: StepRunner
    trainer: Trainer
    held_out: HeldOut
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """Called as `read(groups, count)`: rows of the first `count` groups as text."""


def open_components(settings: RLSettings, context: StageContext, stack: ExitStack) -> RLComponents:
    """Check the inputs, load the models and start the engine; `stack` closes everything.

    Errors in the data, the hints or the teacher's settings are found before a model is loaded.
    """
    rl, group, validation = settings.rl, settings.objective.group, settings.validation
    data, model = context.inputs["data"], context.inputs["model"] / "model"
    tokenizer = load_tokenizer(model)
    text = partial(decode, tokenizer)
    stops, opener = StopTexts(rl.stop, text), prompt_opener(tokenizer)

    def reply(ids: Sequence[int]) -> str:
        """A response as it is graded and shown: with the text that the template opens it with, up to a stop text."""
        return opener + stops.text(ids)

    tasks = read_tasks(settings, data, tokenizer)
    requests, longest_held_out = ((), 0) if validation is None else read_problems(settings, context, tokenizer)

    def encode(messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(render_prompts(tokenizer, [messages])[0])

    texts = Texts(encode, text, reply, stops if rl.stop else None)
    room = context_length(read_shape(model))
    starts = [
        start.with_room(tasks, rl.max_response_tokens, room)
        for start in open_starts(group.starts, texts, settings.seed, rl.steps, group.size)
    ]
    shown = max((start.longest_prompt(tasks) for start in starts), default=0)
    prompt = max(shown, *(len(task.prompt_ids) for task in tasks))
    longest = max(prompt + rl.max_response_tokens, longest_held_out)
    teaching = Teaching(rl.teachers, tasks) if rl.teachers else None
    teachers = (
        {}
        if teaching is None
        else _open_teachers(teaching, settings, context, tasks, starts, tokenizer, reply, longest, stack)
    )
    spec = TrainerSpec(settings, context.execution, model, context.out, longest, tokenizer.pad_token_id, teachers)
    cluster = stack.enter_context(open_cluster(spec))
    cache = context.out / JUDGE_CACHE
    own_graders = () if validation is None else validation.protocol.own_graders
    graders = stack.enter_context(GraderPool.configured(context.execution, settings.grading, cache, own_graders))
    judges = stack.enter_context(closing(Judges(cache)))
    player = None
    if settings.environment is not None:
        player = open_player(settings.environment, tokenizer, settings.lanes, judges)
    collector = GroupCollector(
        grader=graders,
        decode=reply,
        params=SamplingParams(rl.temperature, rl.max_response_tokens, stop_token_ids(tokenizer), stop=rl.stop),
        group=group,
        seed=settings.seed,
        total_steps=rl.steps,
        player=player,
        stops=stops if rl.stop else None,
        starts=starts,
        overlong=rl.overlong,
        step_tokens=rl.partial_rollout_tokens,
    )
    journal = RolloutJournal(context.out / "journal")
    choice = TraceChoice(text, partial(text_tokens, tokenizer), longest) if group.lets_trainer_choose else None
    steps = stack.enter_context(StepRunner(settings, cluster, tasks, collector, journal, teaching, choice))
    references = shown_references(prompts_file(settings, data))

    def read(groups: Sequence[Group], count: int) -> list[SampleRollout]:
        return sample_rollouts(groups, settings.objective.advantage, count, text, reply, references)

    metrics = None if validation is None else measurer(settings, context, requests, tokenizer, graders, judges)

    def measure_weights(step: int) -> dict[str, float]:
        assert metrics is not None
        # With staleness, rollouts of later steps go on meanwhile; they get these weights now instead of at the next
        # step.
        cluster.publish(step)
        return metrics(step, cluster.engine)

    schedule = None if validation is None else validation.schedule
    held_out = HeldOut(cluster.trainer.export, context.out, rl.steps, schedule, measure_weights)
    return RLComponents(steps, cluster.trainer, held_out, read)


def _open_teachers(
    teaching: Teaching,
    settings: RLSettings,
    context: StageContext,
    tasks: Sequence[RolloutTask],
    starts: Sequence[GroupStart],
    tokenizer: PreTrainedTokenizerBase,
    reply: Callable[[Sequence[int]], str],
    longest: int,
    stack: ExitStack,
) -> dict[str, TeacherSpec]:
    """What the ranks load of each teacher, by name; those that are served are connected, and those that see another
    prompt get their prompts."""
    rl, data, model = settings.rl, context.inputs["data"], context.inputs["model"] / "model"
    specs = {}
    for index, (name, teacher) in enumerate(rl.teachers.items()):
        if isinstance(teacher, ServedTeacher):
            servers, where = context.execution.rl_teachers[name], f"execution.rl_teachers.{name}"
            served = connect_teacher(teacher, servers, where, tasks, tokenizer, longest)
            teaching.helped_by(index, stack.enter_context(closing(served)))
        elif isinstance(teacher, SelfTeacher):
            own = teaching.prompts_of(index, read_prompts(prompts_file(settings, data)))
            prompts = TeacherPrompts(tokenizer, own, teacher, reply, context_length(read_shape(model)), name, starts)
            teaching.helped_by(index, prompts)
            specs[name] = TeacherSpec(model, max(prompts.longest + rl.max_response_tokens, longest))
        else:
            folder = _teacher_folder(teacher, f"rl.teachers.{name}.path", tokenizer)
            specs[name] = TeacherSpec(folder, longest)
    return specs


def _teacher_folder(teacher: ModelTeacher, where: str, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of the teacher that the ranks load; DataError where its tokens are not the policy's."""
    path, folder = teacher.path, model_folder(teacher.path, where)
    check_scores(load_tokenizer(folder), tokenizer, f"{where}: the tokenizer of {path}")
    rows = num_embeddings(read_shape(folder))
    if rows is not None and rows < len(tokenizer):
        raise DataError(
            f"{where}: {path} has embeddings for {rows} tokens (vocab_size), and the policy's tokenizer has "
            f"{len(tokenizer)}; give it as many (resize_token_embeddings), or take a teacher that has them"
        )
    return folder


_NO_PROMPTS = "data.train: no prompts are left; see card.md for why rows were rejected"


def prompts_file(settings: RLSettings, data: Path) -> Path:
    """The file of the stage's prompts in the result of `prepare_data`."""
    return data / ("rl_complement.parquet" if settings.prompts == "complement" else "train.parquet")


def read_tasks(settings: RLSettings, data: Path, tokenizer: PreTrainedTokenizerBase) -> list[RolloutTask]:
    """All prompts with their traces and, where known, pass rates; DataError where prompts or traces are too few."""
    prompts = read_prompts(prompts_file(settings, data))
    rates = read_pass_rates(data / RATES_FILE)
    tokenized = tokenize_tasks(tokenizer, prompts, history_of(settings.environment))
    tasks = [replace(task, pass_rate=rates.get(task.uid)) for task in tokenized]
    if not tasks:
        raise DataError(EMPTY_COMPLEMENT if settings.prompts == "complement" else _NO_PROMPTS)
    group, with_traces = settings.objective.group, sum(bool(task.demonstrations) for task in tasks)
    for name in (name for name, start in group.starts.items() if start.shows_trace and not with_traces):
        raise DataError(
            f"objective.group.starts.{name} shows traces, and no training prompt has one: only rollouts would be "
            "learned from; take data with traces, add sample.teachers, or use a method without traces (on_policy)"
        )
    most_traces = max(len(task.demonstrations) for task in tasks)
    for name, start in group.starts.items():
        chooses = isinstance(start.show, WholeTrace) and start.show.choose != "in_turn"
        if chooses and most_traces <= start.num_rows(group.size):
            raise DataError(
                f"objective.group.starts.{name}.show.choose has nothing to choose from: no training prompt has more "
                f"traces than the start has rows, {start.rows}; lower that, or take data with more traces a prompt"
            )
    buffer = settings.objective.interleaved_sft
    if buffer is not None and buffer.buffer_size > with_traces:
        raise DataError(
            f"objective.interleaved_sft.buffer_size is {buffer.buffer_size} but only {with_traces} training prompts "
            "have a trace: it could never fill up; lower it"
        )
    if settings.rl.prompts_per_step > len(tasks):
        which = "prompts of the complement" if settings.prompts == "complement" else "training prompts"
        raise DataError(
            f"rl.prompts_per_step is {settings.rl.prompts_per_step} but only {len(tasks)} {which} are left; lower it "
            "or add prompts"
        )
    return tasks


def tokenize_tasks(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], history: History = "exact"
) -> list[RolloutTask]:
    """A task for each prompt."""
    prompt_ids = render_prompts(tokenizer, [prompt.messages for prompt in prompts])
    encoded = encode_demonstrations(tokenizer, prompts, history)
    (template,) = prompt_texts(tokenizer, [[Message("user", "")]])
    return [
        RolloutTask(
            uid=prompt.uid,
            prompt_ids=tuple(ids),
            ground_truth=prompt.ground_truth,
            demonstrations=tuple(
                Demonstration(trace.reply, turns.token_ids, trace.logprobs, turns.source, turns.context_starts)
                for trace, turns in zip(prompt.traces, of_prompt, strict=True)
            ),
            problem=problem_of(prompt, template),
            messages=prompt.messages,
        )
        for prompt, ids, of_prompt in zip(prompts, prompt_ids, encoded, strict=True)
    ]
