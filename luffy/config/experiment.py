"""The configuration of a whole experiment, one YAML file in `exp_configs/`, and the stages of its chain."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt, ValidationInfo, field_validator

from luffy.config.answers import DifficultyConfig, ExpertIterationConfig, SampleConfig, TeacherConfig
from luffy.config.data import DataConfig
from luffy.config.environment import EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.rules import broken_rules, place_difficulty
from luffy.config.stage_kinds import StageName
from luffy.config.strict import RunName, StrictModel
from luffy.config.training import BaseConfig, RLConfig, SFTConfig


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
    stages: tuple[StageName, ...]
    """The stages of the chain, in order; `difficulty` and `sample.teachers` add the stages of those sections."""
    cluster: Literal["local", "ray"] = "local"
    """Where SFT and RL run: `local`, on this machine, in turn; `ray`, DeepSpeed ranks and vLLM actors, anywhere."""
    seed: NonNegativeInt = 0
    data: DataConfig
    model: ModelConfig
    base: BaseConfig | None = None
    expert_iteration: ExpertIterationConfig = ExpertIterationConfig()
    """Rounds of the stages `sample` and `sft`, in a chain that has both."""
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
    def num_ranks(self) -> int:
        """Trainer ranks."""
        return self.execution.ray.trainer_ranks if self.cluster == "ray" else self.execution.ranks

    @property
    def num_engines(self) -> int:
        """vLLM engines of RL: under `cluster: local` one with `rl.engine: vllm`."""
        if "rl" not in self.stages or self.rl is None:
            return 0
        if self.cluster == "local":
            return int(self.rl.engine == "vllm")
        return self.execution.ray.engines

    @property
    def checkpoint_names(self) -> dict[str, str]:
        """What results call checkpoints otherwise: the model itself, where nothing is trained."""
        name = None if {"sft", "rl"} & {*self.stages} else self.model.shown_name
        return {} if name is None else {"base": name}

    @property
    def shares_gpus(self) -> bool:
        """Whether RL's engines generate on the GPUs of its ranks, in turn."""
        return self.num_engines > 0 and (self.cluster == "local" or self.execution.ray.placement == "colocated")

    @property
    def measured_difficulty(self) -> DifficultyConfig | None:
        """The section `difficulty` with its defaults taken from other sections; None: RL uses all prompts."""
        own, rl = self.difficulty, self.rl
        if own is None or rl is None or "difficulty" not in self.stages:
            return None
        defaults = {
            "temperature": own.temperature or rl.temperature,
            "max_response_tokens": own.max_response_tokens or rl.max_response_tokens,
            "stop": rl.stop if own.stop is None else own.stop,
            "engine": own.engine or (self._engine if rl.engine == "cluster" else rl.engine),
        }
        return own.model_copy(update=defaults)

    @property
    def sampled_traces(self) -> SampleConfig | None:
        """The section `sample` with its defaults taken from other sections; None: the policy makes no traces."""
        own = self.sample
        if own is None or "sample" not in self.stages or own.teachers:
            return None
        limit = own.max_response_tokens or self.data.max_trace_tokens
        return own.model_copy(update={"max_response_tokens": limit, "engine": own.engine or self._engine})

    @property
    def teachers(self) -> Mapping[str, TeacherConfig]:
        """The models that make traces in the stage `sample`; empty: the policy does, or nobody."""
        return {} if self.sample is None or "sample" not in self.stages else self.sample.teachers

    @property
    def _engine(self) -> str:
        return "vllm" if self.cluster == "ray" else "transformers"

    # Reads `difficulty` and `sample`, so those fields are declared before `stages`.
    @field_validator("stages", mode="after")
    @classmethod
    def _stages_of_sections(cls, stages: tuple[StageName, ...], info: ValidationInfo) -> tuple[StageName, ...]:
        difficulty, sample = info.data.get("difficulty"), info.data.get("sample")
        is_taught = sample is not None and bool(sample.teachers)
        # Without base the chain is refused later.
        if is_taught and {"sft", "rl"} & {*stages} and "sample" not in stages and "base" in stages:
            place = stages.index("base") + 1
            stages = (*stages[:place], "sample", *stages[place:])
        if difficulty is not None and stages.count("difficulty") <= 1 and {"base", "rl"} <= set(stages):
            added = stages if "difficulty" in stages else (*stages, "difficulty")
            for policy in ("base", difficulty.policy):  # another policy may be missing
                added = place_difficulty(added, policy, is_taught=is_taught)
            stages = added
        return stages

    def _complaints(self) -> Iterator[str]:
        yield from broken_rules(self)


@dataclass(frozen=True, slots=True)
class StageVisit:
    """One stage of a chain."""

    name: str
    """Unique in the chain."""
    stage: str
    round: int = 0
    """Which round of sampling and SFT, from 1; 0 outside of rounds."""


def visits_of(config: ExperimentConfig) -> list[StageVisit]:
    """The stages in order. Those of rounds always have their number (`sample_1`, `sft_1`), so that a chain with more
    rounds gives them the same names; others only where there are several of a kind."""
    stages = list(config.stages)
    if "sample" not in stages or config.teachers:
        return _numbered(stages)
    start = stages.index("sample")
    end = stages.index("sft", start) + 1 if "sft" in stages[start:] else start + 1
    rounds = [
        StageVisit(f"{stage}_{number}", stage, number)
        for number in range(1, config.expert_iteration.rounds + 1)
        for stage in stages[start:end]
    ]
    return [*_numbered(stages[:start]), *rounds, *_numbered(stages[end:])]


def _numbered(stages: Sequence[str]) -> list[StageVisit]:
    """A repeated stage is numbered (`sft_1`, `sft_2`)."""
    counts = [stages[: place + 1].count(stage) for place, stage in enumerate(stages)]
    return [
        StageVisit(f"{stage}_{number}" if stages.count(stage) > 1 else stage, stage)
        for stage, number in zip(stages, counts, strict=True)
    ]
