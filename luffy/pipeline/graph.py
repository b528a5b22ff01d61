"""The experiment as a graph of stages: which programs run, on what, in which order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from luffy.config import ExperimentConfig, StageName
from luffy.config.settings import (
    BaseSettings,
    DifficultySettings,
    EvaluateSettings,
    PrepareDataSettings,
    ReportSettings,
    RLSettings,
    SFTSettings,
    StageSettings,
    SweepSettings,
)
from luffy.config.training import RLConfig, SFTConfig

Trained = TypeVar("Trained", SFTConfig, RLConfig)


@dataclass(frozen=True, slots=True)
class StageNode:
    """One stage of the chain."""

    name: str
    """Unique in the chain; the stage's name, or `evaluate_<checkpoint>`."""
    stage: StageName
    inputs: Mapping[str, str]
    """Input name to the name of the node that fills it."""
    settings: StageSettings


def build_graph(config: ExperimentConfig, sweep_steps: tuple[int, ...] = ()) -> tuple[StageNode, ...]:
    """The stages of `config`, each after the ones it reads from; with `sweep_steps` the sweep over them comes last."""
    nodes = [StageNode("prepare_data", "prepare_data", {}, _prepare_data(config))]
    if "base" not in config.stages:  # flows/prepare_data.py
        return tuple(nodes)
    nodes.append(StageNode("base", "base", {"data": "prepare_data"}, _base(config)))
    checkpoints = ["base"]
    nodes += _difficulty_behind("base", config)
    if "sft" in config.stages:
        nodes.append(StageNode("sft", "sft", _data_and(checkpoints[-1]), _sft(config)))
        checkpoints.append("sft")
        nodes += _difficulty_behind("sft", config)
    if "rl" in config.stages:
        prompts = "difficulty" if "difficulty" in config.stages else "prepare_data"
        nodes.append(StageNode("rl", "rl", _data_and(checkpoints[-1], prompts), _rl(config)))
        checkpoints.append("rl")
    if "evaluate" in config.stages:
        evaluation = _evaluate(config)
        nodes += [StageNode(f"evaluate_{name}", "evaluate", _data_and(name), evaluation) for name in checkpoints]
    if "report" in config.stages:
        inputs = {"data" if node.name == "prepare_data" else node.name: node.name for node in nodes}
        nodes.append(StageNode("report", "report", inputs, ReportSettings(experiment=config)))
    if sweep_steps:
        settings = SweepSettings(protocol=_evaluate(config), steps=sweep_steps)
        nodes.append(StageNode("sweep", "sweep", _data_and("rl"), settings))
    return tuple(nodes)


def _data_and(model: str, data: str = "prepare_data") -> Mapping[str, str]:
    return {"data": data, "model": model}


def _difficulty_behind(policy: str, config: ExperimentConfig) -> list[StageNode]:
    if config.measured_policy != policy:
        return []
    return [StageNode("difficulty", "difficulty", _data_and(policy), _difficulty(config))]


def _prepare_data(config: ExperimentConfig) -> PrepareDataSettings:
    return PrepareDataSettings(
        seed=config.seed,
        data=config.data,
        grading=config.grading,
        model_path=config.model.source,
        chat_template=config.model.chat_template,
    )


def _base(config: ExperimentConfig) -> BaseSettings:
    return BaseSettings(seed=config.seed, model=config.model, base=config.base)


def _difficulty(config: ExperimentConfig) -> DifficultySettings:
    assert config.measured_difficulty is not None
    return DifficultySettings(
        seed=config.seed,
        dtype=config.model.dtype,
        difficulty=config.measured_difficulty,
        grading=config.grading,
    )


def _sft(config: ExperimentConfig) -> SFTSettings:
    assert config.sft is not None
    return SFTSettings(seed=_seed(config, config.sft), dtype=config.model.dtype, sft=_seedless(config.sft))


def _rl(config: ExperimentConfig) -> RLSettings:
    assert config.rl is not None
    assert config.objective is not None
    correction = config.rl.correction
    return RLSettings(
        seed=_seed(config, config.rl),
        dtype=config.model.dtype,
        cluster=config.cluster,
        rl=_seedless(config.rl).model_copy(update={"correction": None}),
        objective=config.objective if correction is None else config.objective.with_correction(correction),
        grading=config.grading,
    )


def _seed(config: ExperimentConfig, stage: SFTConfig | RLConfig) -> int:
    return config.seed if stage.seed is None else stage.seed


def _seedless(stage: Trained) -> Trained:
    """Without the seed that the settings name already: 0 spelled out and 0 inherited are the same stage."""
    return stage.model_copy(update={"seed": None})


def _evaluate(config: ExperimentConfig) -> EvaluateSettings:
    assert config.evaluation is not None
    return EvaluateSettings(
        seed=config.seed, dtype=config.model.dtype, evaluation=config.evaluation, grading=config.grading
    )
