"""The registry of stage kinds: the one description that chains, plans, runs, Prefect and the pages read.

A new stage takes two edits: its program in `luffy/stages/`, and its entry here. The position of the entry is the
position of the stage in a chain.

A stage declares the *role* of each input, not the stage that makes it: `policy` is the newest policy of the chain,
whichever stage made it. So the same entries wire every chain (`luffy.pipeline.chain.graph`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeVar

from luffy.config.difficulty import DifficultyConfig
from luffy.config.environment import without_groups
from luffy.config.evaluation import EvaluationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.expert_iteration import SampleConfig
from luffy.config.settings import (
    BaseSettings,
    DifficultySettings,
    EvaluateSettings,
    PrepareDataSettings,
    ReportSettings,
    RLSettings,
    SampleSettings,
    SFTSettings,
    StageSettings,
    SweepSettings,
    SynthesizeSettings,
)
from luffy.config.training import RLConfig, SFTConfig
from luffy.config.validation import HeldOutSettings, ValidationConfig

Role = Literal["data", "traces", "prompts", "policy", "evaluation"]
"""What a stage provides to others: suites and tokenizer; training data with its traces; RL's prompts; a model; graded
responses."""
ViewName = Literal[
    "accuracies",
    "accuracy_curves",
    "data_card",
    "difficulty_card",
    "evaluated_samples",
    "metrics",
    "report_page",
    "rollout_samples",
    "sample_card",
    "synthesis_card",
    "training_curves",
]
"""Views of a stage in the Prefect UI (`tasks/artifacts.py`)."""
_GROUND = ("*", "config/*", "config/objective")
_GRADED = ("environments", "grading", "hosted", "sandbox")
_TRAINED = ("data", "objectives", "tracking", "training")
_ANSWERED = (*_GRADED, "data", "evaluation/*", "rollout", "statistics", "stages/answers")
_SAMPLED = (*_ANSWERED, "stages/sample.py", "tracking", "training")
_VALIDATED = (*_ANSWERED, "stages/held_out.py")
"""What counts beside a training stage's own rooms where it validates the policy as it learns."""
ASKING_ROOMS = (
    "*",
    "data/prompt_templates.py",
    "data/templates.py",
    "rollout",
    "stages/answers/clients.py",
    "stages/answers/paid.py",
    "stages/answers/requests.py",
    "stages/answers/store.py",
)
"""Rooms that the responses of an evaluation depend on, however they are graded."""
PLAYING_ROOMS = (*_GRADED, "data")
"""In an environment also these."""
Trained = TypeVar("Trained", SFTConfig, RLConfig)


@dataclass(frozen=True, slots=True)
class StageKind:
    """One kind of stage."""

    name: str
    title: str
    settings: type[StageSettings]
    """Type of its program's settings."""
    configure: Callable[[ExperimentConfig], StageSettings] | None
    """Derives its settings from an experiment; None: it is not part of any chain and runs on its own."""
    inputs: Mapping[str, Role] = field(default_factory=dict)
    """Input name to the role of the input."""
    further_inputs: Callable[[StageSettings], Mapping[str, Role]] = lambda settings: {}
    """Inputs that only some settings need."""
    provides: tuple[Role, ...] = ()
    for_each: Role | None = None
    """The chain has one such stage for each result of this role, named after it (`evaluate_sft`)."""
    requires: tuple[Role, ...] = ()
    """Further roles that earlier stages must provide."""
    reads_all: bool = False
    """Whether it reads every earlier stage, under that stage's name unless `inputs` names it."""
    sections: tuple[str, ...] = ()
    """Sections of the experiment that it requires."""
    gpus: Callable[[ExperimentConfig], int] = lambda config: 0
    """GPUs of this machine that it can use."""
    rooms: tuple[str, ...] = ()
    """Rooms of the code that can change its result (`luffy.pipeline.chain.code_identity`), besides `_GROUND` and its
    own module."""
    views: tuple[ViewName, ...] = ()
    pages: tuple[str, ...] = ()
    """Outputs for people to open, which a run links into its own directory."""

    @property
    def program(self) -> str:
        """Its module."""
        return f"luffy.stages.{self.name}"

    def rooms_of(self, settings: StageSettings) -> tuple[str, ...]:
        """All rooms whose code can change its result with these settings."""
        measured = _VALIDATED if getattr(settings, "validation", None) is not None else ()
        return tuple(sorted({*_GROUND, f"stages/{self.name}.py", *self.rooms, *measured}))


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


def _held_out_data(settings: StageSettings) -> Mapping[str, Role]:
    """Inputs of a validation: the outputs of `difficulty` and `sample` contain only training prompts."""
    return {"held_out": "data"} if getattr(settings, "validation", None) else {}


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


def _gpus_of_rl(config: ExperimentConfig) -> int:
    if config.cluster == "local":
        return 1
    return cluster_gpus(config) if config.execution.ray.address is None else 0  # a remote cluster assigns its own


def _gpus_of_sft(config: ExperimentConfig) -> int:
    if config.cluster == "local":
        return 1
    return config.execution.ray.trainer_ranks if config.execution.ray.address is None else 0


def _gpus_of_generation(
    section: EvaluationConfig | DifficultyConfig | SampleConfig | None, config: ExperimentConfig
) -> int:
    engine = section.engine if section is not None else None
    return {"openai": 0, "vllm": engine_gpus(config)}.get(engine or "", 1)


def _gpus_of_teachers(config: ExperimentConfig) -> int:
    engines = config.synthesize.local_engines if config.synthesize is not None else frozenset()
    return max(({"vllm": engine_gpus(config)}.get(engine, 1) for engine in engines), default=0)


_KINDS = (
    StageKind(
        "prepare_data",
        "Verified prompts with traces, evaluation suites, and the tokenizer",
        PrepareDataSettings,
        _prepare_data,
        provides=("data", "traces", "prompts"),
        rooms=(*_GRADED, "data", "rollout"),
        views=("data_card",),
    ),
    StageKind(
        "base",
        "The starting policy",
        BaseSettings,
        _base,
        inputs={"data": "data"},
        provides=("policy",),
        gpus=lambda config: 1 if config.model.architecture is not None else 0,  # a folder is only copied
        rooms=(*_TRAINED, "rollout", "stages/supervised_run.py"),
        views=("metrics", "training_curves"),
    ),
    StageKind(
        "synthesize",
        "Training data with traces that teachers wrote",
        SynthesizeSettings,
        _synthesize,
        inputs={"data": "data"},
        provides=("traces", "prompts"),
        sections=("synthesize", "data.train"),
        gpus=_gpus_of_teachers,
        rooms=(*_ANSWERED, "stages/synthesis", "training"),
        views=("synthesis_card",),
    ),
    StageKind(
        "difficulty",
        "Training prompts that the policy solves neither too rarely nor too often",
        DifficultySettings,
        _difficulty,
        inputs={"data": "prompts", "model": "policy"},
        provides=("prompts",),
        sections=("difficulty",),
        gpus=lambda config: _gpus_of_generation(config.measured_difficulty, config),
        rooms=_SAMPLED,
        views=("difficulty_card",),
    ),
    StageKind(
        "sample",
        "The policy's own answers to the training prompts, and its traces: those that are correct",
        SampleSettings,
        _sample,
        inputs={"data": "data", "model": "policy"},
        provides=("traces",),
        sections=("sample", "data.train"),
        gpus=lambda config: _gpus_of_generation(config.sampled_traces, config),
        rooms=_SAMPLED,
        views=("sample_card",),
    ),
    StageKind(
        "sft",
        "The policy after supervised fine-tuning on traces",
        SFTSettings,
        _sft,
        inputs={"data": "traces", "model": "policy"},
        further_inputs=_held_out_data,
        provides=("policy",),
        sections=("sft", "data.train"),
        gpus=_gpus_of_sft,
        rooms=(*_TRAINED, "cluster", "stages/supervised_run.py"),
        views=("metrics", "training_curves"),
    ),
    StageKind(
        "rl",
        "The policy after mixed-policy reinforcement learning",
        RLSettings,
        _rl,
        inputs={"data": "prompts", "model": "policy"},
        further_inputs=_held_out_data,
        provides=("policy",),
        sections=("rl", "objective", "data.train"),
        gpus=_gpus_of_rl,
        rooms=(
            *_GRADED,
            *_TRAINED,
            "cluster",
            "rl",
            "rollout",
            "stages/rl_components.py",
        ),
        views=("metrics", "training_curves", "rollout_samples"),
    ),
    StageKind(
        "evaluate",
        "Accuracy of one checkpoint on all suites, with all decodings",
        EvaluateSettings,
        evaluate_settings,
        inputs={"data": "data", "model": "policy"},
        provides=("evaluation",),
        for_each="policy",
        sections=("evaluation",),
        gpus=lambda config: _gpus_of_generation(config.evaluation, config),
        rooms=(*_ANSWERED, "tracking"),
        views=("accuracies", "evaluated_samples"),
    ),
    StageKind(
        "report",
        "The report: accuracies, learning curves, samples and the configuration",
        ReportSettings,
        lambda config: ReportSettings(experiment=config),
        inputs={"data": "data"},
        requires=("evaluation",),
        reads_all=True,
        rooms=(*_GRADED, "config/many_runs", "data", "evaluation", "report", "statistics", "tracking"),
        views=("accuracies", "accuracy_curves", "report_page"),
        pages=("report.html", "report.md"),
    ),
    StageKind(
        "sweep",
        "Accuracy of checkpoints within an RL run, evaluated in turn by the same engines",
        SweepSettings,
        None,
        inputs={"data": "data", "model": "policy"},
        provides=("evaluation",),
        gpus=lambda config: _gpus_of_generation(config.evaluation, config),
        rooms=(*_ANSWERED, "objectives", "stages/evaluate.py", "tracking", "training"),
        views=("accuracies", "accuracy_curves"),
        pages=("curve.html",),
    ),
)
STAGE_KINDS: Mapping[str, StageKind] = MappingProxyType({kind.name: kind for kind in _KINDS})
STAGE_ORDER = tuple(kind.name for kind in _KINDS if kind.configure is not None)
"""The stages that a chain may have, in order."""
