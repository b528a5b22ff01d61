"""Settings of each stage program: the part of the experiment that changes its result, and nothing else.

A field that is not in a stage's settings cannot change what it computes, so the settings are its identity
(`luffy.pipeline.identity`); execution and tracking travel beside them.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import Field, PositiveInt

from luffy.config.answers import DifficultyConfig, SampleConfig, SynthesizeConfig
from luffy.config.data import DataConfig
from luffy.config.environment import LANES, EnvironmentConfig, without_groups
from luffy.config.evaluation import EvaluationConfig, HeldOutSettings, ValidationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.grading import GradingConfig
from luffy.config.model import DType, LoRAConfig, ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.config.strict import NOT_IDENTITY, StrictModel
from luffy.config.training import BaseConfig, RLConfig, SFTConfig

StageSettings = StrictModel
"""Settings that every stage has; `SETTINGS` maps stages to their settings classes."""
Trained = TypeVar("Trained", SFTConfig, RLConfig)


class PrepareDataSettings(StrictModel):
    """`prepare_data`: sources to verified parquet, and the tokenizer that counts its tokens."""

    seed: int
    data: DataConfig
    grading: GradingConfig
    model_path: str | None
    """`ModelConfig.source` whose tokenizer is adapted; None: a tokenizer is built from the data."""
    chat_template: str | None
    environment: EnvironmentConfig | None = None


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
    environment: EnvironmentConfig | None = None
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
    environment: EnvironmentConfig | None = None
    """Answers the policy between its turns."""


class SFTSettings(StrictModel):
    """`sft`: supervised learning on traces."""

    seed: int
    dtype: DType
    cluster: Annotated[Literal["local", "ray"], NOT_IDENTITY]
    """Where it trains. Not part of the stage's identity, like the number of ranks: it changes the last bits of a step,
    and the masks of a model with dropout."""
    sft: SFTConfig
    environment: EnvironmentConfig | None = None
    lora: LoRAConfig | None = None
    """None: all weights are trained."""
    validation: HeldOutSettings | None = None
    """`sft.validation`, completed with values of other sections."""

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
    validation: HeldOutSettings | None = None
    """`rl.validation`, completed with values of other sections."""
    prompts: Literal["train", "complement"] = "train"
    """`DataConfig.rl`."""

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


def cluster_gpus(config: ExperimentConfig) -> int:
    """Total GPUs of the trainer's ranks and the engines under `cluster: ray`."""
    ray, vllm = config.execution.ray, config.execution.vllm
    engines = config.num_engines * vllm.tensor_parallel_size
    return ray.trainer_ranks + engines if ray.placement == "disaggregated" else max(ray.trainer_ranks, engines)


def engine_gpus(config: ExperimentConfig) -> int:
    """Total GPUs of the vLLM engines that answer the prompts of an evaluation or of `difficulty`."""
    return config.execution.vllm.engines * config.execution.vllm.tensor_parallel_size


def _prepare_data(config: ExperimentConfig) -> PrepareDataSettings:
    data = config.data
    if "synthesize" in config.stages:  # which chooses SFT's examples itself, once their traces are there
        data = data.model_copy(
            update={"sft": data.sft.model_copy(update={"unique_train_examples": "all"}), "rl": "train"}
        )
    return PrepareDataSettings(
        seed=config.seed,
        data=data,
        grading=config.grading,
        model_path=config.model.source,
        chat_template=config.model.chat_template,
        environment=config.environment,
    )


def _base(config: ExperimentConfig) -> BaseSettings:
    return BaseSettings(seed=config.seed, model=config.model.model_copy(update={"lora": None}), base=config.base)


def _difficulty(config: ExperimentConfig) -> DifficultySettings:
    assert config.measured_difficulty is not None
    return DifficultySettings(
        seed=config.seed,
        dtype=config.model.dtype,
        difficulty=config.measured_difficulty,
        grading=config.grading,
        environment=config.environment,
    )


def _synthesize(config: ExperimentConfig) -> SynthesizeSettings:
    assert config.synthesize is not None
    return SynthesizeSettings(
        seed=config.seed,
        synthesize=config.synthesize,
        data=config.data,
        grading=config.grading,
        environment=without_groups(config.environment),
    )


def _sample(config: ExperimentConfig) -> SampleSettings:
    assert config.sampled_traces is not None
    return SampleSettings(
        seed=_seed(config, config.sampled_traces),
        dtype=config.model.dtype,
        sample=config.sampled_traces.model_copy(update={"seed": None}),
        grading=config.grading,
        environment=without_groups(config.environment),
    )


def _sft(config: ExperimentConfig) -> SFTSettings:
    assert config.sft is not None
    return SFTSettings(
        seed=_seed(config, config.sft),
        dtype=config.model.dtype,
        cluster=config.cluster,
        sft=_seedless(config.sft),
        environment=config.environment,
        lora=config.model.lora,
        validation=_held_out(config, config.sft.validation, None),
    )


def _rl(config: ExperimentConfig) -> RLSettings:
    assert config.rl is not None
    assert config.objective is not None
    correction, lora = config.rl.correction, config.model.lora
    return RLSettings(
        seed=_seed(config, config.rl),
        dtype=config.model.dtype,
        cluster=config.cluster,
        rl=_seedless(config.rl).model_copy(update={"correction": None}),
        objective=config.objective if correction is None else config.objective.with_correction(correction),
        grading=config.grading,
        environment=config.environment,
        prompts=config.data.rl,
        lora=None if lora is None else lora.without_dropout,
        validation=_held_out(config, config.rl.validation, config.rl.max_response_tokens),
    )


def _held_out(
    config: ExperimentConfig, validation: ValidationConfig | None, max_response_tokens: int | None
) -> HeldOutSettings | None:
    """The validation of a stage whose own responses have at most `max_response_tokens`; None: it has no responses."""
    if validation is None:
        return None
    evaluation = config.evaluation
    limit = max_response_tokens or (evaluation.max_response_tokens if evaluation is not None else None)
    limit = limit or validation.max_response_tokens
    assert limit is not None, "the experiment was checked for it"
    return validation.spelled_out(evaluation, config.grading, limit)


def _seed(config: ExperimentConfig, stage: SampleConfig | SFTConfig | RLConfig) -> int:
    return config.seed if stage.seed is None else stage.seed


def _seedless(stage: Trained) -> Trained:
    """The section without its seed and its validation, which the settings hold separately.

    A seed of 0 is one stage, given or not.
    """
    return stage.model_copy(update={"seed": None, "validation": None})


def evaluate_settings(config: ExperimentConfig) -> EvaluateSettings:
    """The experiment's protocol for evaluating a checkpoint."""
    assert config.evaluation is not None
    return EvaluateSettings(
        seed=config.seed,
        dtype=config.model.dtype,
        evaluation=config.evaluation,
        grading=config.grading,
        environment=config.environment,
    )


def _gpus_of_training(config: ExperimentConfig, on_ray: int) -> int:
    if config.cluster == "local":
        return 1
    return on_ray if config.execution.ray.address is None else 0  # a remote cluster assigns its own


def _gpus_of_generation(
    section: EvaluationConfig | DifficultyConfig | SampleConfig | None, config: ExperimentConfig
) -> int:
    engine = section.engine if section is not None else None
    return {"openai": 0, "vllm": engine_gpus(config)}.get(engine or "", 1)


def _gpus_of_teachers(config: ExperimentConfig) -> int:
    engines = config.synthesize.local_engines if config.synthesize is not None else frozenset()
    return max(({"vllm": engine_gpus(config)}.get(engine, 1) for engine in engines), default=0)


SETTINGS: dict[str, type[StageSettings]] = {
    "prepare_data": PrepareDataSettings,
    "base": BaseSettings,
    "synthesize": SynthesizeSettings,
    "difficulty": DifficultySettings,
    "sample": SampleSettings,
    "sft": SFTSettings,
    "rl": RLSettings,
    "evaluate": EvaluateSettings,
    "report": ReportSettings,
    "sweep": SweepSettings,
    **{kind.name: kind.settings for kind in STAGE_KINDS.values() if kind.settings is not None},
}
"""The type of each stage's settings."""
CONFIGURE: dict[str, Callable[[ExperimentConfig], StageSettings]] = {
    "prepare_data": _prepare_data,
    "base": _base,
    "synthesize": _synthesize,
    "difficulty": _difficulty,
    "sample": _sample,
    "sft": _sft,
    "rl": _rl,
    "evaluate": evaluate_settings,
    "report": lambda config: ReportSettings(experiment=config),
    **{kind.name: kind.configure for kind in STAGE_KINDS.values() if kind.configure is not None},
}
"""Derives the settings of each stage of a chain from an experiment."""
GPUS: dict[str, Callable[[ExperimentConfig], int]] = {
    "base": lambda config: 1 if config.model.architecture is not None else 0,  # a folder is only copied
    "synthesize": _gpus_of_teachers,
    "difficulty": lambda config: _gpus_of_generation(config.measured_difficulty, config),
    "sample": lambda config: _gpus_of_generation(config.sampled_traces, config),
    "sft": lambda config: _gpus_of_training(config, config.execution.ray.trainer_ranks),
    "rl": lambda config: _gpus_of_training(config, cluster_gpus(config)),
    "evaluate": lambda config: _gpus_of_generation(config.evaluation, config),
    "sweep": lambda config: _gpus_of_generation(config.evaluation, config),
    **{kind.name: kind.gpus for kind in STAGE_KINDS.values() if kind.gpus is not None},
}
"""GPUs of this machine that a stage can use; none for the others."""
