"""Inputs of a bench: the run's own data and starting policy where they are available, else made-up ones.

Data that needs no download, and a policy that is only copied, are made by their real stages first; they stay in the
workspace, and the run reuses them.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from luffy.config import ExperimentConfig
from luffy.config.data import HubSource
from luffy.config.evaluation import DecodingConfig, EvaluationConfig
from luffy.config.execution import ExecutionConfig
from luffy.config.model import locate
from luffy.config.settings import DifficultySettings, EvaluateSettings, SampleSettings
from luffy.costs.stand_ins import BASE, DATA, PROGRAM, StandIns, write_ask
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.suite_files import suite_files
from luffy.errors import ConfigError
from luffy.pipeline.chain.manifest import Manifest, write_manifest
from luffy.pipeline.chain.plan import StagePlan
from luffy.pipeline.experiment import Experiment, ExperimentRun, StageObserver
from luffy.pipeline.machine.architecture import architecture_of
from luffy.pipeline.machine.supervise import supervise

_JUDGE = '"kind":"judge"'
_MORE_PROMPTS = 64
_TRAIN = "train.parquet"


@dataclass(frozen=True, slots=True)
class BenchInputs:
    """Folders in the form of finished stages."""

    data: Path
    prompts: Path
    """The data that RL reads: selected by difficulty where that is finished."""
    base: Path
    rl_start: Path
    """The policy that RL would start from, or `base`."""
    own_data: bool
    """Whether it is the run's own."""
    own_base: bool
    own_rl_start: bool
    words: tuple[str, ...]
    """The inputs that are used, in words for the user."""


def make_quick_stages(experiment: Experiment, folder: Path, observer: StageObserver) -> None:
    """Make `prepare_data` and `base` where they take no download and no training."""
    run = ExperimentRun(experiment, folder)  # its record is not one of the workspace's runs
    for name, is_quick in (("prepare_data", _needs_no_download), ("base", _is_only_copied)):
        plans = {plan.node.name: plan for plan in experiment.plan()}
        ready = all(plans[source].action == "reuse" for source in plans[name].node.inputs.values())
        if plans[name].action != "reuse" and ready and is_quick(experiment.config):
            run.execute(name, observer)


def find_inputs(config: ExperimentConfig, plans: Mapping[str, StagePlan], folder: Path) -> BenchInputs:
    """The run's own data and policies where they are finished; the rest is made in `folder`.

    Raises ConfigError for a policy that is not at hand and whose shape is unknown.
    """
    data, base = plans["prepare_data"], plans["base"]
    own_data, own_base = data.action == "reuse", base.action == "reuse"
    if not (own_data and own_base):
        _make(config, data.directory if own_data else None, folder, needs_base=not own_base)
    data_folder = data.directory if own_data else folder / DATA
    base_folder = base.directory if own_base else folder / BASE
    start, prompts = _newest(plans, "model"), _newest(plans, "data")
    return BenchInputs(
        data=data_folder,
        prompts=prompts.directory if prompts is not None and own_data else data_folder,
        base=base_folder,
        rl_start=start.directory if start is not None else base_folder,
        own_data=own_data,
        own_base=own_base,
        own_rl_start=start is not None,
        words=(_data_words(config, own_data), _model_words(config, base, own_base)),
    )


@dataclass(frozen=True, slots=True)
class SomeProblems:
    """A part of the problems that a stage answers, in the form of prepared suites."""

    data: Path
    num_responses: int
    """Number of responses to the problems in `data`."""
    every: int
    """Number of responses to all problems."""


def some_suites(data: Path, settings: EvaluateSettings, most: int, folder: Path) -> SomeProblems:
    """A copy of the suites in `folder` with about `most` responses under all decodings."""
    protocol, decodings = settings.evaluation.protocol, list(settings.evaluation.decodings)
    files = suite_files(data, settings.evaluation.only)
    suites = {name: read_prompts(file) for name, file in files.items()}
    per_problem = {name: sum(protocol(name, decoding).num_samples for decoding in decodings) for name in suites}
    every = sum(len(prompts) * per_problem[name] for name, prompts in suites.items())
    (folder / "suites").mkdir(parents=True)
    left = most
    for name, prompts in suites.items():
        kept = prompts[: max(1, left // per_problem[name])]
        write_prompts(folder / files[name].relative_to(data), kept)
        left -= len(kept) * per_problem[name]
        if left <= 0:
            break
    _finish(folder, data)
    return SomeProblems(folder, most - left, every)


def some_training_prompts(data: Path, num_samples: int, most: int, folder: Path) -> SomeProblems:
    """Training prompts as a suite in `folder`, with about `most` responses, `num_samples` to each."""
    prompts = read_prompts(data / _TRAIN)
    kept = prompts[: max(1, most // num_samples)]
    (folder / "suites").mkdir(parents=True)
    write_prompts(folder / "suites" / _TRAIN, kept)
    _finish(folder, data)
    return SomeProblems(folder, num_samples * len(kept), num_samples * len(prompts))


def answering_as_evaluation(settings: DifficultySettings | SampleSettings) -> EvaluateSettings:
    """The evaluation that samples as the stage does, with the training prompts as its suite."""
    config = settings.difficulty if isinstance(settings, DifficultySettings) else settings.sample
    assert config.temperature is not None
    assert config.max_response_tokens is not None
    assert config.engine is not None
    protocol = EvaluationConfig(
        decodings={"answers": DecodingConfig(temperature=config.temperature, num_samples=config.num_samples)},
        max_response_tokens=config.max_response_tokens,
        stop=config.stop or (),
        engine=config.engine,
    )
    return EvaluateSettings(seed=settings.seed, dtype=settings.dtype, evaluation=protocol, grading=settings.grading)


def _finish(folder: Path, data: Path) -> None:
    (folder / _TRAIN).symlink_to(data / _TRAIN)  # its traces may say how long responses are
    mark_finished(folder, "prepare_data")


def mark_finished(folder: Path, stage: str) -> None:
    """Make `folder` look like the result of `stage`, for the programs that read it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(
        stage=stage, node=stage, key=folder.name, series=None, settings={}, upstream={}, consumed={}, outputs=(),
        metrics={}, execution=ExecutionConfig(), versions={}, hardware={},
        started=now, ended=now,
    )  # fmt: skip
    write_manifest(folder, manifest)


def _make(config: ExperimentConfig, data: Path | None, folder: Path, *, needs_base: bool) -> None:
    tiny = config.model.architecture if needs_base else None
    shape = architecture_of(config.model) if needs_base and tiny is None else None
    if needs_base and tiny is None and shape is None:
        raise ConfigError(
            f"model: the policy is not in the workspace and its shape is unknown here ({config.model.source}); give a "
            "model folder, or run the chain up to its stage base first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [section.max_response_tokens for section in (config.rl, config.evaluation) if section is not None]
    lengths.append(config.data.max_trace_tokens)
    batches = [config.sft.batch_size if config.sft else 0, config.rl.prompts_per_step if config.rl else 0]
    wanted = StandIns(
        seed=config.seed,
        dtype=config.model.dtype,
        data=None if data is None else str(data),
        tiny=tiny,
        shape=shape,
        context=config.model.max_position_embeddings or config.data.max_prompt_tokens + max(lengths) + 1,
        num_prompts=max(batches) + _MORE_PROMPTS,
        prompt_tokens=config.data.max_prompt_tokens,
        trace_tokens=config.data.max_trace_tokens,
        suites=tuple(config.data.suites),
    )
    write_ask(folder, wanted)
    supervise([sys.executable, "-m", PROGRAM, str(folder)], folder, on_event=lambda event: None)
    for name, stage in ((DATA, "prepare_data"), (BASE, "base")):
        if (folder / name).is_dir():
            mark_finished(folder / name, stage)


def _newest(plans: Mapping[str, StagePlan], entry: str) -> StagePlan | None:
    """The finished stage that RL reads through `entry`; None where it is not finished, or where there is no RL."""
    rl = next((plan for plan in plans.values() if plan.node.stage == "rl"), None)
    source = None if rl is None else plans[rl.node.inputs[entry]]
    return source if source is not None and source.action == "reuse" else None


def _needs_no_download(config: ExperimentConfig) -> bool:
    data = config.data
    sources = [
        *data.training_sources.values(),
        data.corpus,
        *data.suites.values(),
        *data.decontamination.benchmarks.values(),
    ]
    asks_a_judge = _JUDGE in config.grading.model_dump_json()
    return not any(isinstance(source, HubSource) for source in sources) and _is_local(config) and not asks_a_judge


def _is_only_copied(config: ExperimentConfig) -> bool:
    return config.model.source is not None and _is_local(config)


def _is_local(config: ExperimentConfig) -> bool:
    return config.model.source is None or Path(locate(config.model.source)).expanduser().exists()


def _data_words(config: ExperimentConfig, own: bool) -> str:
    if own:
        return "data: the run's own prompts and traces"
    return (
        f"data: made up, every prompt of {config.data.max_prompt_tokens} tokens and every trace of "
        f"{config.data.max_trace_tokens}, the limits of the settings; luffy prepare makes the run's own"
    )


def _model_words(config: ExperimentConfig, base: StagePlan, own: bool) -> str:
    if own:
        return f"policy: that of base {base.identity.key}"
    return f"policy: random weights in the shape of {config.model.source or 'model.architecture'}"
