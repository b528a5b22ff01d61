"""Opens the components of the RL loop: models, engine, graders and collector, from the stage's settings and inputs."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from luffy.cluster.open import Cluster, open_cluster
from luffy.config.settings import RLSettings
from luffy.config.training import SelfTeacher, ServedTeacher
from luffy.data.parquet import confidential_uids, read_prompts
from luffy.data.templates import decode, load_tokenizer, prompt_opener, render_prompts, stop_token_ids
from luffy.data.tokenizer import is_same_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.registry import open_player
from luffy.errors import DataError
from luffy.grading.judge import Judges
from luffy.grading.pool import JUDGE_CACHE, GraderPool
from luffy.model_shape import num_embeddings
from luffy.rl.groups import GroupCollector, sample_rollouts
from luffy.rl.loop import RowTeacher, StepRunner
from luffy.rl.rows import RolloutTask
from luffy.rl.teaching import ServedTeaching, TeacherPrompts
from luffy.rl.trace_starts import Anchors, HintedPrompts
from luffy.rollout.engine import RolloutEngine, SamplingParams, StopTexts
from luffy.rollout.vllm_limits import read_shape
from luffy.stages.program import StageContext
from luffy.stages.rl_tasks import prompts_file, read_tasks
from luffy.stages.unmeasured import HeldOutMeasure, Unmeasured
from luffy.tracking.journal import RolloutJournal
from luffy.tracking.tracker import SampleRollout
from luffy.training.learner import TeacherSpec, Trainer, TrainerSpec
from luffy.training.model_folder import model_folder
from luffy.types import Group, Message

if TYPE_CHECKING:  # imported where there is a validation, since it loads all of an evaluation
    from luffy.stages.held_out import HeldOutProblems


@dataclass(frozen=True, slots=True)
class RLComponents:
    """The objects that the RL loop needs."""

    steps: StepRunner
    trainer: Trainer
    held_out: HeldOutMeasure
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
        settings = self._settings
        tasks = read_tasks(settings, self._data, self._tokenizer)
        problems = self._held_out_problems()
        hints = self._hints()
        longest = max(self._longest_row(tasks, hints), 0 if problems is None else problems.longest)
        shown = self._prompts_of_self_teacher()
        teaching = shown if shown is not None else self._served_teaching(tasks, longest)
        spec = TrainerSpec(
            settings,
            self._context.execution,
            self._model,
            self._context.out,
            longest,
            self._tokenizer.pad_token_id,
            self._teacher(longest if shown is None else shown.longest + settings.rl.max_response_tokens),
        )
        cluster = self._stack.enter_context(open_cluster(spec))
        graders = self._graders()
        judges = self._stack.enter_context(closing(Judges(self._context.out / JUDGE_CACHE)))
        collector = self._collector(graders, self._player(judges), hints)
        journal = RolloutJournal(self._context.out / "journal")
        steps = self._stack.enter_context(StepRunner(settings, cluster, tasks, collector, journal, teaching))
        return RLComponents(
            steps, cluster.trainer, self._held_out(problems, cluster, graders, judges), self._sample_reader()
        )

    def _text(self, ids: Sequence[int]) -> str:
        return decode(self._tokenizer, ids)

    def _reply(self, ids: Sequence[int]) -> str:
        """A response as it is graded and shown: with the text that the template opens it with, up to a stop text."""
        return self._opener + self._stops.text(ids)

    def _longest_row(self, tasks: Sequence[RolloutTask], hints: HintedPrompts | None) -> int:
        """Largest number of tokens of a prompt, bare or hinted, with its response."""
        longest = max(len(task.prompt_ids) for task in tasks)
        return max(longest, 0 if hints is None else hints.longest(tasks)) + self._settings.rl.max_response_tokens

    def _hints(self) -> HintedPrompts | None:
        config = self._settings.objective.group.hint
        if config is None:
            return None

        def encode(messages: Sequence[Message]) -> tuple[int, ...]:
            return tuple(render_prompts(self._tokenizer, [messages])[0])

        return HintedPrompts(config, encode, self._settings.seed, self._settings.rl.steps)

    def _prompts_of_self_teacher(self) -> TeacherPrompts | None:
        """The prompts that the policy is shown as its own teacher; None: it is not its own teacher."""
        config = self._settings.rl.teacher
        if not isinstance(config, SelfTeacher):
            return None
        return TeacherPrompts(self._tokenizer, read_prompts(prompts_file(self._settings, self._data)), config)

    def _served_teaching(self, tasks: Sequence[RolloutTask], longest: int) -> RowTeacher | None:
        """The connection to a teacher on servers; None without one."""
        config = self._settings.rl.teacher
        if not isinstance(config, ServedTeacher):
            return None
        where = self._context.execution.rl_teacher
        served = ServedTeaching.connect(config, where, tasks, self._tokenizer, longest)
        return self._stack.enter_context(closing(served))

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

    def _graders(self) -> GraderPool:
        settings, context = self._settings, self._context
        own = () if settings.validation is None else settings.validation.protocol.own_graders
        cache = context.out / JUDGE_CACHE
        return self._stack.enter_context(
            GraderPool.configured(context.execution.grader_workers, settings.grading, cache, own)
        )

    def _player(self, judges: Judges) -> EpisodePlayer | None:
        """Plays the episodes of `environment`; None: a response is a single turn."""
        settings = self._settings
        if settings.environment is None:
            return None
        return open_player(settings.environment, self._tokenizer, settings.lanes, judges)

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

    def _held_out_problems(self) -> "HeldOutProblems | None":
        validation = self._settings.validation
        if validation is None:
            return None
        from luffy.stages.held_out import read_problems

        return read_problems(validation, self._context.inputs["held_out"], self._model, self._tokenizer)

    def _held_out(
        self, problems: "HeldOutProblems | None", cluster: Cluster, graders: GraderPool, judges: Judges
    ) -> HeldOutMeasure:
        """The validation, sampled by the cluster's engine with the current weights."""
        if problems is None:
            return Unmeasured(cluster.trainer.export)
        from luffy.stages.held_out import open_for_rl

        def engine_at(step: int) -> RolloutEngine:
            # With staleness, rollouts of later steps go on meanwhile; they get these weights now instead of at the
            # next step.
            cluster.publish(step)
            return cluster.engine

        export = cluster.trainer.export
        return open_for_rl(self._settings, self._context, problems, engine_at, export, graders, judges, self._tokenizer)
