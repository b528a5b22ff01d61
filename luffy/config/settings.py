"""Settings of each stage program: the part of the experiment that changes its result, and nothing else.

A field that is not in a stage's settings cannot change what it computes, so the settings are its identity
(`luffy.pipeline.identity`); execution and tracking travel beside them.
"""

from typing import Literal

from pydantic import Field, PositiveInt, SerializationInfo, SerializerFunctionWrapHandler, model_serializer

from luffy.config.data import DataConfig
from luffy.config.difficulty import DifficultyConfig
from luffy.config.environment import LANES, EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.expert_iteration import SampleConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import DType, LoRAConfig, ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.strict import StrictModel, is_for_identity, is_none, without_unused
from luffy.config.synthesis import SynthesizeConfig
from luffy.config.training import BaseConfig, RLConfig, SFTConfig
from luffy.config.validation import HeldOutSettings

StageSettings = StrictModel
"""Settings that every stage has; `luffy.config.stage_kinds` maps stages to their settings classes."""


class PrepareDataSettings(StrictModel):
    """`prepare_data`: sources to verified parquet, and the tokenizer that counts its tokens."""

    seed: int
    data: DataConfig
    grading: GradingConfig
    model_path: str | None
    """`ModelConfig.source` whose tokenizer is adapted; None: a tokenizer is built from the data."""
    chat_template: str | None
    environment: EnvironmentConfig | None = None

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        values = dump(self)
        if is_for_identity(info.context):
            del values["data"]["rl"]  # all splits are written, whichever RL reads
        return values


class BaseSettings(StrictModel):
    """`base`: the starting policy, trained from scratch or adapted from a folder."""

    seed: int
    model: ModelConfig
    """Without `lora`, which this stage does not use."""
    base: BaseConfig | None


class DifficultySettings(StrictModel):
    """`difficulty`: pass rates of one policy, and the training prompts they leave to RL."""

    seed: int
    dtype: DType
    difficulty: DifficultyConfig
    """With the defaults from other sections filled in."""
    grading: GradingConfig
    environment: EnvironmentConfig | None = None


class SynthesizeSettings(StrictModel):
    """`synthesize`: teachers' answers to training prompts, and the training data with those that are kept."""

    seed: int
    synthesize: SynthesizeConfig
    data: DataConfig
    """Its limits and filters hold for what teachers write, too."""
    grading: GradingConfig
    environment: EnvironmentConfig | None = Field(default=None, exclude_if=is_none)
    """Answers the teachers between their turns."""


class SampleSettings(StrictModel):
    """`sample`: one policy's answers to the training prompts, and the traces that are kept of them."""

    seed: int
    dtype: DType
    sample: SampleConfig
    """With the defaults from other sections filled in."""
    grading: GradingConfig
    round: PositiveInt = 1
    """Round of sampling and SFT, from 1; each round samples with different seeds."""
    environment: EnvironmentConfig | None = Field(default=None, exclude_if=is_none)
    """Answers the policy between its turns."""


class SFTSettings(StrictModel):
    """`sft`: supervised learning on traces."""

    seed: int
    dtype: DType
    cluster: Literal["local", "ray"]
    """Where it trains. Not part of the stage's identity, like the number of ranks: it changes the last bits of a step,
    and the masks of a model with dropout."""
    sft: SFTConfig
    environment: EnvironmentConfig | None = None
    lora: LoRAConfig | None = None
    """None: all weights are trained."""
    validation: HeldOutSettings | None = Field(default=None, exclude_if=is_none)
    """`sft.validation`, completed with values of other sections."""

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        values = dump(self)
        if is_for_identity(info.context):
            del values["cluster"]
        return values

    @property
    def depends_on_length(self) -> bool:
        """Whether what happens at a step changes when the stage is made longer, or its length is not given in steps."""
        sft = self.sft
        return (
            sft.steps is None
            or sft.max_tokens is not None
            or sft.optimizer.schedule.depends_on_length
            or sft.objective.depends_on_length
            or (self.validation is not None and self.validation.shows_last_step(sft.steps))
        )


class RLSettings(StrictModel):
    """`rl`: mixed-policy reinforcement learning."""

    seed: int
    dtype: DType
    cluster: Literal["local", "ray"]
    rl: RLConfig
    objective: ObjectiveConfig
    grading: GradingConfig
    lora: LoRAConfig | None = None
    """Without its dropout. None: all weights are trained."""
    environment: EnvironmentConfig | None = None
    validation: HeldOutSettings | None = Field(default=None, exclude_if=is_none)
    """`rl.validation`, completed with values of other sections."""
    prompts: Literal["train", "complement"] = "train"
    """`DataConfig.rl`."""

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        return without_unused(dump(self), {"prompts": "train"}, info.context)

    @property
    def lanes(self) -> int:
        """Calls of the engine that the episodes of a step make at the same time; 0: one, for all that wait.

        In one process they must not depend on the time that tools take: a resumed run repeats them.
        """
        return 0 if self.environment is None or self.cluster == "local" else LANES

    @property
    def depends_on_length(self) -> bool:
        """Whether what happens at a step changes when the stage is made longer."""
        if self.validation is not None and self.validation.shows_last_step(self.rl.steps):
            return True
        critic = self.rl.critic
        schedules = [self.rl.optimizer.schedule] + ([critic.optimizer.schedule] if critic is not None else [])
        sampling = self.rl.sampling.depends_on_length
        return sampling or self.objective.depends_on_length or any(schedule.depends_on_length for schedule in schedules)


class EvaluateSettings(StrictModel):
    """`evaluate`: one checkpoint over all suites and decodings."""

    seed: int
    dtype: DType
    evaluation: EvaluationConfig
    grading: GradingConfig
    environment: EnvironmentConfig | None = None


class SweepSettings(StrictModel):
    """`sweep`: checkpoints of one RL run, each as `evaluate` does it."""

    protocol: EvaluateSettings
    steps: tuple[PositiveInt, ...] = Field(min_length=1)
    """Steps of the checkpoints, in the order in which they are evaluated."""


class ReportSettings(StrictModel):
    """`report`: the page a person opens. It shows the experiment's configuration, so that is its identity."""

    experiment: ExperimentConfig
