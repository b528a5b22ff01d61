"""The configuration of a whole experiment, one YAML file in `exp_configs/`, and the stages of its chain."""

from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import NonNegativeInt, SerializationInfo, field_serializer

from luffy.config.answers import DifficultyConfig, SampleConfig, TeacherConfig
from luffy.config.chain import StageEntry, by_name
from luffy.config.data import DataConfig
from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.rules import broken_rules
from luffy.config.strict import FOR_REPORT, Name, RunName, StrictModel
from luffy.config.training import BaseConfig, ModelTeacher, RLConfig, SFTConfig


class ExperimentConfig(StrictModel):
    """The complete configuration of a run."""

    name: RunName
    """Names the runs (`<name>-1`, `<name>-2`, ...)."""
    chain: str | None = None
    """The file in `exp_configs/chains/` that set `stages`; None: the experiment itself."""
    method: str | None = None
    """The file in `exp_configs/methods/` that set `objective`; None: the experiment itself."""
    difficulty: DifficultyConfig | None = None
    """Selects RL's prompts by a policy's pass rates; None: RL uses all of them."""
    sample: SampleConfig | None = None
    """How the policy, or teachers, answer training prompts; None: traces come from `data.train` alone."""
    stages: dict[Name, StageEntry]
    """The stages of the chain, in order: a list of kinds and of `NAME: {kind: KIND, ...}` with what is a stage's own.
    `difficulty` and `sample.teachers` add the stages of those sections."""
    cluster: Literal["local", "ray"] = "local"
    """Where SFT and RL run: `local`, on this machine, in turn; `ray`, DeepSpeed ranks and vLLM actors, anywhere."""
    seed: NonNegativeInt = 0
    data: DataConfig
    model: ModelConfig
    base: BaseConfig | None = None
    sft: SFTConfig | None = None
    rl: RLConfig | None = None
    objective: ObjectiveConfig | None = None
    evaluation: EvaluationConfig | None = None
    grading: GradingConfig = GradingConfig()
    environment: EnvironmentConfig | None = None
    """Answers the policy and teachers between their turns, in all stages; None: a response is a single turn."""
    execution: ExecutionConfig = ExecutionConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its stages, in the order of the chain."""
        return tuple(entry.kind for entry in self.stages.values())

    def seen_by(self, stage: str) -> "ExperimentConfig":
        """The experiment as the stage of that name sees it: with what is its own in place of the sections."""
        entry = self.stages[stage]
        own = entry.own | ({} if entry.method is None else {"method": entry.method})
        return self.model_copy(update=own) if own else self

    @property
    def is_taught(self) -> bool:
        """Whether a stage of the chain has teachers write traces."""
        return any(self.seen_by(name).teachers for name, entry in self.stages.items() if entry.kind == "sample")

    @property
    def num_ranks(self) -> int:
        """Trainer ranks."""
        return self.execution.ray.trainer_ranks if self.cluster == "ray" else self.execution.ranks

    @property
    def num_engines(self) -> int:
        """vLLM engines of RL: under `cluster: local` one with `rl.engine: vllm`."""
        if "rl" not in self.kinds or self.rl is None:
            return 0
        if self.cluster == "local":
            return int(self.rl.engine == "vllm")
        return self.execution.ray.engines

    @property
    def checkpoint_names(self) -> dict[str, str]:
        """What results call checkpoints otherwise: the model itself, where nothing is trained."""
        name = None if {"sft", "rl"} & {*self.kinds} else self.model.shown_name
        return {} if name is None else {"base": name}

    @property
    def shares_gpus(self) -> bool:
        """Whether RL's engines generate on the GPUs of its ranks, in turn."""
        return self.num_engines > 0 and (self.cluster == "local" or self.execution.ray.placement == "colocated")

    @property
    def measured_difficulty(self) -> DifficultyConfig | None:
        """The section `difficulty` with its defaults taken from other sections; None: RL uses all prompts."""
        own, rl = self.difficulty, self.rl
        if own is None or rl is None or "difficulty" not in self.kinds:
            return None
        defaults = {
            "temperature": own.temperature or rl.temperature,
            "max_response_tokens": own.max_response_tokens or rl.max_response_tokens,
            "stop": rl.stop if own.stop is None else own.stop,
            "engine": own.engine or (self._engine if rl.engine == "cluster" else rl.engine),
        }
        return own.model_copy(update=defaults)

    @property
    def probed_teacher(self) -> ModelTeacher | None:
        """The teacher whose pass rates the stage `difficulty` measures; None: it measures the policy's."""
        name = None if self.difficulty is None else self.difficulty.teacher
        teacher = None if self.rl is None or name is None else self.rl.teachers.get(name)
        return teacher if isinstance(teacher, ModelTeacher) else None

    @property
    def policy_difficulty(self) -> DifficultyConfig | None:
        """`measured_difficulty` where it measures the policy."""
        return self.measured_difficulty if self.probed_teacher is None else None

    @property
    def sampled_traces(self) -> SampleConfig | None:
        """The section `sample` with its defaults taken from other sections; None: the policy makes no traces."""
        own = self.sample
        if own is None or "sample" not in self.kinds or own.teachers:
            return None
        limit = own.max_response_tokens or self.data.max_trace_tokens
        return own.model_copy(update={"max_response_tokens": limit, "engine": own.engine or self._engine})

    @property
    def teachers(self) -> Mapping[str, TeacherConfig]:
        """The models that make traces in the stage `sample`; empty: the policy does, or nobody."""
        return {} if self.sample is None or "sample" not in self.kinds else self.sample.teachers

    @property
    def _engine(self) -> str:
        return "vllm" if self.cluster == "ray" else "transformers"

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        return super().read({**values, "stages": by_name(values["stages"])} if "stages" in values else values)

    @field_serializer("stages")
    def _as_given(self, stages: dict[str, StageEntry], info: SerializationInfo) -> list[object]:
        found = list[object]()
        for name, entry in stages.items():
            given = {each for each in entry.model_fields_set if each != "kind" or entry.kind != name}
            given -= {"group"} if info.context == FOR_REPORT else set()
            own = entry.model_dump(mode=info.mode, context=info.context, include=given)
            found.append({name: own} if own else name)
        return found

    def _complaints(self) -> Iterator[str]:
        yield from broken_rules(self)
