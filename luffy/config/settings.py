"""Settings of each stage program: the part of the experiment that changes its result, and nothing else, so they are its
identity (`luffy.pipeline.identity`); execution and tracking travel beside them."""

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, PositiveInt, ValidationError

from luffy.config.answers import DifficultyConfig, SampleConfig, TeacherConfig
from luffy.config.chain import StageNode
from luffy.config.data import DataConfig
from luffy.config.environment import LANES, EnvironmentConfig
from luffy.config.evaluation import EvaluationConfig, HeldOutSettings
from luffy.config.experiment import ExperimentConfig
from luffy.config.fields import explain
from luffy.config.grading import GradingConfig, RewardModelGrader, reward_models
from luffy.config.model import DType, LoRAConfig, ModelConfig
from luffy.config.objective import ObjectiveConfig
from luffy.config.stage_kinds import STAGE_KINDS, StageKind
from luffy.config.strict import NOT_IDENTITY, StrictModel
from luffy.config.training import BaseConfig, ModelTeacher, RLConfig, SFTConfig
from luffy.errors import ConfigError

StageSettings = StrictModel
"""Settings that every stage has; `SETTINGS` maps stages to their settings classes."""
Settings = TypeVar("Settings", bound=StrictModel)


class _Graded(StrictModel):
    seed: int
    grading: GradingConfig
    environment: EnvironmentConfig | None = None
    """Answers the policy, or teachers, between their turns."""


class PrepareDataSettings(_Graded):
    """`prepare_data`: sources to verified parquet, and the tokenizer that counts its tokens."""

    data: DataConfig
    model_path: str | None
    """`ModelConfig.source` whose tokenizer is adapted; None: a tokenizer is built from the data."""
    chat_template: str | None
    template_date: str | None = None


class BaseSettings(StrictModel):
    """`base`: the starting policy, trained from scratch or adapted from a folder."""

    seed: int
    model: ModelConfig
    """Without `lora`, which this stage does not use."""
    base: BaseConfig | None


class DifficultySettings(_Graded):
    """`difficulty`: pass rates of one model, and the training prompts they leave to RL."""

    dtype: DType
    difficulty: DifficultyConfig
    teacher: ModelTeacher | None = None
    """Whose they are; None: the policy's."""


class SampleSettings(_Graded):
    """`sample`: answers of one policy, or of teachers, to the training prompts, and the traces that are kept."""

    dtype: DType = "float32"
    """The policy's; teachers have their own."""
    sample: SampleConfig
    round: PositiveInt = 1
    """The policy's round of sampling and SFT, from 1; each round samples with different seeds."""
    data: DataConfig | None = None
    """Its limits and filters hold for what teachers write, too; None: the policy answers."""


class SFTSettings(StrictModel):
    """`sft`: supervised learning on traces."""

    seed: int
    dtype: DType
    cluster: Annotated[Literal["local", "ray"], NOT_IDENTITY]
    """Changes, like the number of ranks, the last bits of a step and dropout masks alone: no part of the identity."""
    sft: SFTConfig
    environment: EnvironmentConfig | None = None
    lora: LoRAConfig | None = None
    """None: all weights are trained."""
    validation: HeldOutSettings | None = None

    @property
    def depends_on_length(self) -> bool:
        sft, validation = self.sft, self.validation
        if sft.steps is None or sft.steps % sft.steps_per_phase:
            return True
        is_shown = validation is not None and validation.shows_last_step(sft.steps)
        return is_shown or sft.optimizer.schedule.depends_on_length or sft.objective.depends_on_length


class RLSettings(_Graded):
    """`rl`: mixed-policy reinforcement learning."""

    dtype: DType
    cluster: Literal["local", "ray"]
    rl: RLConfig
    objective: ObjectiveConfig
    lora: LoRAConfig | None = None
    """Without its dropout. None: all weights are trained."""
    validation: HeldOutSettings | None = None
    prompts: Literal["train", "complement"] = "train"
    """`DataConfig.rl`."""

    @property
    def lanes(self) -> int:
        """Calls of the engine that the episodes of a step make at the same time; 0: one, for all that wait. In one
        process they must not depend on the time that tools take: a resumed run repeats them."""
        return 0 if self.environment is None or self.cluster == "local" else LANES

    @property
    def depends_on_length(self) -> bool:
        if self.validation is not None and self.validation.shows_last_step(self.rl.steps):
            return True
        critic = self.rl.critic
        schedules = [self.rl.optimizer.schedule] + ([critic.optimizer.schedule] if critic is not None else [])
        sampling = self.rl.sampling.depends_on_length
        return sampling or self.objective.depends_on_length or any(schedule.depends_on_length for schedule in schedules)


class EvaluateSettings(_Graded):
    """`evaluate`: one checkpoint over all suites and decodings."""

    dtype: DType
    evaluation: EvaluationConfig


class SweepSettings(StrictModel):
    """`sweep`: checkpoints of one RL run, each as `evaluate` does it."""

    protocol: EvaluateSettings
    steps: tuple[PositiveInt, ...] = Field(min_length=1)
    """Steps of the checkpoints, in the order in which they are evaluated."""


class ReportSettings(StrictModel):
    """`report`: the page a person opens. It shows the experiment's configuration, so that is its identity."""

    experiment: ExperimentConfig

    @classmethod
    def read(cls, values: Mapping[str, object]) -> Self:
        if not isinstance(experiment := values.get("experiment"), dict):
            return super().read(values)
        return cls(experiment=ExperimentConfig.read(experiment))


def cluster_gpus(config: ExperimentConfig) -> int:
    """Total GPUs of the trainer's ranks and the engines under `cluster: ray`."""
    ray, vllm = config.execution.ray, config.execution.vllm
    engines = config.num_engines * vllm.tensor_parallel_size
    return ray.trainer_ranks + engines if ray.placement == "disaggregated" else max(ray.trainer_ranks, engines)


def engine_gpus(config: ExperimentConfig) -> int:
    """Total GPUs of the vLLM engines that answer the prompts of an evaluation or of `difficulty`."""
    return config.execution.vllm.engines * config.execution.vllm.tensor_parallel_size


def has_own_vllm(config: ExperimentConfig, stage: str) -> bool:
    """Whether the stage's program generates with a vLLM engine in its own process."""
    if stage == "rl":
        return config.cluster == "local" and config.num_engines > 0
    if stage == "sft":
        return config.sft is not None and config.sft.engine == "vllm"
    sections = {"difficulty": config.policy_difficulty, "sample": config.sampled_traces}
    section = sections.get(stage, config.evaluation if stage in ("evaluate", "sweep") else None)
    return section is not None and section.engine == "vllm" and engine_gpus(config) == 1


def scored_by(config: ExperimentConfig, stage: str) -> list[RewardModelGrader]:
    """The reward models that score in the stage's process."""
    trained = {"sft": config.sft, "rl": config.rl}.get(stage)
    validates = trained is not None and trained.validation is not None
    if not (issubclass(settings_class(STAGE_KINDS[stage]), _Graded) or stage == "sweep" or validates):
        return []
    protocol = config.evaluation if validates or stage in ("evaluate", "sweep") else None
    return reward_models([*config.grading.kinds, *(protocol.own_graders if protocol is not None else ())])


def _settings(kind: type[Settings], config: ExperimentConfig, **own: object) -> Settings:
    """A stage's settings, whose fields hold what the experiment and its model have by those names, except for `own`."""
    shared = {**dict(config), "dtype": config.model.dtype, "lora": config.model.lora}
    return kind.model_validate({name: shared[name] for name in kind.model_fields if name in shared} | own)


def _prepare_data(config: ExperimentConfig) -> Mapping[str, object]:
    data = config.data
    if config.is_taught:  # the stage sample chooses SFT's examples, once their traces are there
        sft = data.sft.model_copy(update={"unique_train_examples": "all"})
        data = data.model_copy(update={"sft": sft, "rl": "train"})
    model = config.model
    named = {"chat_template": model.chat_template, "template_date": model.template_date}
    return {"data": data, "model_path": model.source, **named}


def _difficulty(config: ExperimentConfig) -> Mapping[str, object]:
    difficulty, teacher = config.measured_difficulty, config.probed_teacher
    assert difficulty is not None
    probed = None if teacher is None else teacher.model_copy(update={"rows": None})
    return {"difficulty": difficulty.model_copy(update={"teacher": None}), "teacher": probed}


def _sample(config: ExperimentConfig) -> Mapping[str, object]:
    sample = config.sampled_traces or config.sample
    assert sample is not None
    of_author = {"data": config.data, "dtype": "float32"} if sample.teachers else {"data": None}
    seed = config.seed if sample.seed is None else sample.seed
    return {"seed": seed, "sample": sample.model_copy(update={"seed": None}), **of_author}


def _rl(config: ExperimentConfig) -> Mapping[str, object]:
    rl, objective, lora = config.rl, config.objective, config.model.lora
    assert rl is not None
    assert objective is not None
    return {
        "objective": objective if rl.correction is None else objective.with_correction(rl.correction),
        "prompts": config.data.rl,
        "lora": None if lora is None else lora.without_dropout,
        **_trained("rl", rl.model_copy(update={"correction": None}), config, rl.max_response_tokens),
    }


def _trained(
    stage: str, section: SFTConfig | RLConfig | None, config: ExperimentConfig, limit: int | None
) -> dict[str, object]:
    """The section without its seed and validation, and those: a seed of 0 is one stage, given or not. The stage's own
    responses have at most `limit` tokens; None: it has none."""
    assert section is not None
    held_out, validation, evaluation = None, section.validation, config.evaluation
    if validation is not None:
        limit = limit or (evaluation.max_response_tokens if evaluation is not None else validation.max_response_tokens)
        assert limit is not None, "the experiment was checked for it"
        held_out = validation.spelled_out(evaluation, config.grading, limit)
    plain = section.model_copy(update={"seed": None, "validation": None})
    return {stage: plain, "seed": config.seed if section.seed is None else section.seed, "validation": held_out}


def evaluate_settings(config: ExperimentConfig) -> EvaluateSettings:
    return _settings(EvaluateSettings, config)


def _gpus_of_training(config: ExperimentConfig, on_ray: int) -> int:
    if config.cluster == "local":
        return config.num_ranks
    return on_ray if config.execution.ray.address is None else 0  # a remote cluster assigns its own


def _gpus_of_generation(
    config: ExperimentConfig, *sections: EvaluationConfig | DifficultyConfig | SampleConfig | TeacherConfig | None
) -> int:
    gpus = {"openai": 0, "vllm": engine_gpus(config)}
    return max((1 if each is None else gpus.get(each.engine or "", 1) for each in sections), default=0)


def _gpus_of_sampling(config: ExperimentConfig) -> int:
    local = [teacher for teacher in config.teachers.values() if teacher.path is not None]
    return _gpus_of_generation(config, *(local if config.teachers else [config.sampled_traces]))


SETTINGS: dict[str, type[StageSettings]] = {
    "prepare_data": PrepareDataSettings,
    "base": BaseSettings,
    "difficulty": DifficultySettings,
    "sample": SampleSettings,
    "sft": SFTSettings,
    "rl": RLSettings,
    "evaluate": EvaluateSettings,
    "report": ReportSettings,
    "sweep": SweepSettings,
}
_OWN: dict[str, Callable[[ExperimentConfig], Mapping[str, object]]] = {
    "prepare_data": _prepare_data,
    "base": lambda config: {"model": config.model.model_copy(update={"lora": None})},
    "difficulty": _difficulty,
    "sample": _sample,
    "sft": lambda config: _trained("sft", config.sft, config, None),
    "rl": _rl,
    "report": lambda config: {"experiment": config},
}
"""Fields of a kind's settings that are not what the experiment has by those names."""
GPUS: dict[str, Callable[[ExperimentConfig], int]] = {
    # A folder is only copied.
    "base": lambda config: config.execution.ranks if config.model.architecture is not None else 0,
    "difficulty": lambda config: _gpus_of_generation(config, config.measured_difficulty),
    "sample": _gpus_of_sampling,
    "sft": lambda config: _gpus_of_training(config, config.execution.ray.trainer_ranks),
    "rl": lambda config: _gpus_of_training(config, cluster_gpus(config)),
    "evaluate": lambda config: _gpus_of_generation(config, config.evaluation),
    "sweep": lambda config: _gpus_of_generation(config, config.evaluation),
}
"""GPUs of this machine that a stage can use; none for the others."""


def settings_class(kind: StageKind) -> type[StageSettings]:
    """The type of the settings of such a stage."""
    return kind.settings or SETTINGS[kind.name]


def settings_in(config: ExperimentConfig, kind: str) -> StageSettings:
    """The settings of a stage of a chain, of a kind of this package, from the experiment as it sees it."""
    return _settings(SETTINGS[kind], config, **(_OWN[kind](config) if kind in _OWN else {}))


def settings_of(stage: StageNode) -> StageSettings:
    """The settings of a stage of a chain. ConfigError for options that its class refuses."""
    kind, config = stage.kind, stage.config
    if kind.settings is None:
        return settings_in(config, kind.name)
    try:
        if kind.configure is not None:
            return kind.configure(config)
        return _settings(kind.settings, config, **({"options": stage.options} if stage.options else {}))
    except ValidationError as error:
        raise ConfigError(explain(error, kind.settings, {}, otherwise=f"stages.{stage.name}")) from None


def gpus_in(config: ExperimentConfig, kind: StageKind) -> int:
    """GPUs of this machine that a stage of this kind can use."""
    found = kind.gpus or GPUS.get(kind.name)
    return 0 if found is None else found(config)
