"""Opens the components of the RL loop: tasks, models, engine, graders and collector, from the stage's settings and
inputs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from luffy.cluster.local import Cluster, open_cluster
from luffy.config.environment import History, history_of
from luffy.config.grading import GraderKind
from luffy.config.settings import RLSettings
from luffy.config.training import SelfTeacher, ServedTeacher
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import confidential_uids, read_prompts
from luffy.data.pass_rates import RATES_FILE, read_pass_rates
from luffy.data.splits import EMPTY_COMPLEMENT
from luffy.data.templates import decode, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.data.tokenizer import is_same_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.registry import open_player
from luffy.errors import DataError
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.grading.request import problem_of
from luffy.model_shape import num_embeddings
from luffy.rl.groups import GroupCollector, sample_rollouts
from luffy.rl.loop import RowTeacher, StepRunner
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.teaching import TeacherPrompts, connect_teacher
from luffy.rl.trace_starts import Anchors, HintedPrompts
from luffy.rollout.engine import RolloutEngine, SamplingParams, StopTexts
from luffy.rollout.vllm_limits import read_shape
from luffy.stages.held_out import HeldOut, HeldOutProblems, open_for_rl, read_problems
from luffy.stages.program import StageContext
from luffy.stages.training_span import Unmeasured
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
    held_out: HeldOut | Unmeasured
    read: Callable[[Sequence[Group], int], list[SampleRollout]]
    """Called as `read(groups, count)`: rows of the first `count` groups as text."""


def open_components(settings: RLSettings, context: StageContext, stack: ExitStack) -> RLComponents:
    """Check the inputs, load the models and start the engine; `stack` closes everything."""
    return _Opening(settings, context, stack).components()


class _Opening:
    """Opens the components of one run of the stage.

    Errors in the data, the hints or the teacher's settings are found before a model is loaded.
    """

    def __init__(self, settings: RLSettings, context: StageContext, stack: ExitStack) -> None:
        self._settings = settings
        self._context = context
        self._stack = stack
        self._data = context.inputs["data"]
        self._model = context.inputs["model"] / "model"
        self._tokenizer = load_tokenizer(self._model)
        self._stops = StopTexts(settings.rl.stop, self._text)
        self._opener = prompt_opener(self._tokenizer)

    def components(self) -> RLComponents:
        settings, context, rl = self._settings, self._context, self._settings.rl
        tasks, tokenizer = read_tasks(settings, self._data, self._tokenizer), self._tokenizer
        problems = None
        own_graders: Sequence[GraderKind] = ()
        if settings.validation is not None:
            held_out, own_graders = context.inputs["held_out"], settings.validation.protocol.own_graders
            problems = read_problems(settings.validation, settings.seed, held_out, self._model, tokenizer)
        hints = self._hints()
        prompt = max(max(len(task.prompt_ids) for task in tasks), 0 if hints is None else hints.longest(tasks))
        longest = max(prompt + rl.max_response_tokens, 0 if problems is None else problems.longest)
        teaching: RowTeacher | None = None
        longest_taught = longest
        if isinstance(rl.teacher, SelfTeacher):
            shown = TeacherPrompts(tokenizer, read_prompts(prompts_file(settings, self._data)), rl.teacher)
            teaching, longest_taught = shown, shown.longest + rl.max_response_tokens
        elif isinstance(rl.teacher, ServedTeacher):
            served = connect_teacher(rl.teacher, context.execution.rl_teacher, tasks, tokenizer, longest)
            teaching = self._stack.enter_context(closing(served))
        teacher = self._teacher(longest_taught)
        spec = TrainerSpec(
            settings, context.execution, self._model, context.out, longest, tokenizer.pad_token_id, teacher
        )
        cluster = self._stack.enter_context(open_cluster(spec))
        cache, workers = context.out / JUDGE_CACHE, context.execution.grader_workers
        graders = GraderPool.configured(workers, settings.grading, cache, own_graders)
        self._stack.enter_context(graders)
        judges = self._stack.enter_context(closing(Judges(cache)))
        player = None
        if settings.environment is not None:
            player = open_player(settings.environment, tokenizer, settings.lanes, judges)
        collector = self._collector(graders, player, hints)
        journal = RolloutJournal(context.out / "journal")
        steps = self._stack.enter_context(StepRunner(settings, cluster, tasks, collector, journal, teaching))
        return RLComponents(
            steps, cluster.trainer, self._held_out(problems, cluster, graders, judges), self._sample_reader()
        )

    def _text(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids)

    def _reply(self, ids: Sequence[int]) -> str:
        """A response as it is graded and shown: with the text that the template opens it with, up to a stop text."""
        return self._opener + self._stops.text(ids)

    def _hints(self) -> HintedPrompts | None:
        config = self._settings.objective.group.hint
        if config is None:
            return None

        def encode(messages: Sequence[Message]) -> tuple[int, ...]:
            return tuple(render_prompts(self._tokenizer, [messages])[0])

        return HintedPrompts(config, encode, self._settings.seed, self._settings.rl.steps)

    def _teacher(self, longest: int) -> TeacherSpec | None:
        """The teacher that the ranks load; None without one. DataError where its tokens are not the policy's."""
        config = self._settings.rl.teacher
        if config is None or isinstance(config, ServedTeacher):
            return None
        if isinstance(config, SelfTeacher):
            return TeacherSpec(self._model, longest)
        folder = model_folder(config.path, "rl.teacher.path")
        if not is_same_tokenizer(load_tokenizer(folder), self._tokenizer):
            raise DataError(
                f"rl.teacher.path: the tokenizer of {config.path} is not the policy's, so it cannot score the "
                "policy's tokens; take a teacher of the same family, or let it write traces instead (section "
                "synthesize)"
            )
        rows = num_embeddings(read_shape(folder))
        if rows is not None and rows < len(self._tokenizer):
            raise DataError(
                f"rl.teacher.path: {config.path} has embeddings for {rows} tokens (vocab_size), and the policy's "
                f"tokenizer has {len(self._tokenizer)}; give it as many (resize_token_embeddings), or take a teacher "
                "that has them"
            )
        return TeacherSpec(folder, longest)

    def _collector(
        self, graders: GraderPool, player: EpisodePlayer | None, hints: HintedPrompts | None
    ) -> GroupCollector:
        settings, rl = self._settings, self._settings.rl
        return GroupCollector(
            grader=graders,
            decode=self._reply,
            params=SamplingParams(
                rl.temperature, rl.max_response_tokens, stop_token_ids(self._tokenizer), stop=rl.stop
            ),
            group=settings.objective.group,
            seed=settings.seed,
            total_steps=rl.steps,
            player=player,
            stops=self._stops if rl.stop else None,
            hints=hints,
            anchors=self._anchors(),
        )

    def _anchors(self) -> Anchors | None:
        config = self._settings.objective.group.anchor
        return None if config is None else Anchors(config, self._text, self._settings.seed)

    def _sample_reader(self) -> Callable[[Sequence[Group], int], list[SampleRollout]]:
        confidential = confidential_uids(prompts_file(self._settings, self._data))

        def read(groups: Sequence[Group], count: int) -> list[SampleRollout]:
            advantage = self._settings.objective.advantage
            return sample_rollouts(groups, advantage, count, self._text, self._reply, confidential)

        return read

    def _held_out(
        self, problems: HeldOutProblems | None, cluster: Cluster, graders: GraderPool, judges: Judges
    ) -> HeldOut | Unmeasured:
        """The validation, sampled by the cluster's engine with the current weights."""
        if problems is None:
            return Unmeasured(cluster.trainer.export)

        def engine_at(step: int) -> RolloutEngine:
            # With staleness, rollouts of later steps go on meanwhile; they get these weights now instead of at the
            # next step.
            cluster.publish(step)
            return cluster.engine

        export = cluster.trainer.export
        return open_for_rl(self._settings, self._context, problems, engine_at, export, graders, judges, self._tokenizer)


_FILES = {"train": "train.parquet", "complement": "rl_complement.parquet"}
"""Files of `RLSettings.prompts`."""
_NONE_LEFT = {
    "train": "data.train: no prompts are left; see card.md for why rows were rejected",
    "complement": EMPTY_COMPLEMENT,
}


def prompts_file(settings: RLSettings, data: Path) -> Path:
    """The file of the stage's prompts in the result of `prepare_data`."""
    return data / _FILES[settings.prompts]


def read_tasks(settings: RLSettings, data: Path, tokenizer: PreTrainedTokenizerBase) -> list[RolloutTask]:
    """All prompts with their traces and, where known, pass rates; DataError where prompts or traces are too few."""
    prompts = read_prompts(prompts_file(settings, data))
    rates = read_pass_rates(data / RATES_FILE)
    tokenized = tokenize_tasks(tokenizer, prompts, history_of(settings.environment))
    tasks = [replace(task, pass_rate=rates.get(task.uid)) for task in tokenized]
    if not tasks:
        raise DataError(_NONE_LEFT[settings.prompts])
    group, with_traces = settings.objective.group, sum(bool(task.demonstrations) for task in tasks)
    uses = {"off_policy": group.off_policy, "hint": group.hint, "anchor": group.anchor}
    for name in (name for name, setting in uses.items() if setting and not with_traces):
        raise DataError(
            f"objective.group.{name} uses traces, and no training prompt has one: only rollouts would be learned "
            "from; take data with traces, add the section synthesize, or use a method without traces (on_policy)"
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
