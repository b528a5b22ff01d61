"""`--explain CONFIG`: prints the objective of a training stage, in words and symbols, without running it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from luffy.config import StageName, load_experiment
from luffy.config.experiment import ExperimentConfig
from luffy.config.settings import RLSettings, SFTSettings
from luffy.config.shipped import experiment_file
from luffy.config.training import CriticConfig
from luffy.config.yaml_source import read_yaml
from luffy.errors import EXIT_OK, ConfigError, UserError
from luffy.objectives.explain import explain_objective, explain_terms
from luffy.pipeline.chain.graph import build_graph
from luffy.pipeline.chain.job import read_job

FLAG = "--explain"


def explain_if_asked(stage: StageName) -> None:
    """Handle `--explain` and exit; return when it is not on the command line."""
    if FLAG in sys.argv[1:]:
        sys.exit(explain_program(stage, sys.argv[1:]))


def explain_program(stage: StageName, arguments: Sequence[str]) -> int:
    """Print the objective of `stage` in an experiment, or in a stage's own `config.yaml`; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m luffy.stages.{stage}")
    parser.add_argument(FLAG, type=Path, required=True, metavar="CONFIG", help="an experiment or a stage's config.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the experiment")
    options = parser.parse_args(arguments)
    try:
        sys.stdout.write(explain_stage(_settings(stage, options.explain, options.overrides)) + "\n")
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return EXIT_OK


def explain_experiment(
    config: Path | str, overrides: Sequence[str] = (), only: str | None = None
) -> list[tuple[str, str]]:
    """Name and explanation of each training stage in an experiment's chain, or of the one stage in its `config.yaml`.

    Raises ConfigError when there is no training stage, or none called `only`.
    """
    path = experiment_file(config)
    values, _ = read_yaml(path)
    if "settings" in values and "stage" in values:
        job = read_job(path)
        found: dict[str, object] = {job.stage: job.settings} if job.stage in _EXPLAIN else {}
    else:
        nodes = build_graph(load_experiment(config, overrides))
        found = {node.name: node.settings for node in nodes if node.stage in _EXPLAIN}
    if not found:
        raise ConfigError(f"{config}: has no training stage (sft, rl) to explain")
    if only is not None and only not in found:
        raise ConfigError(f"{config}: has no training stage {only!r}; there are {', '.join(found)}")
    return [(name, explain_stage(settings)) for name, settings in found.items() if only in (None, name)]


def explain_stage(settings: object) -> str:
    """The explanation of one training stage."""
    if isinstance(settings, RLSettings):
        return explain_rl(settings)
    assert isinstance(settings, SFTSettings)
    return explain_sft(settings)


def explain_rl(settings: RLSettings) -> str:
    """The objective of RL and the shape of its steps."""
    rl = settings.rl
    updates = f"{rl.updates_per_step} optimizer steps"
    if rl.updates_per_step == 1:
        updates = "1 optimizer step (so pi_old is the policy itself: r = 1, and clips of r never act)"
    step = (
        f"Step          {rl.prompts_per_step} prompts, {updates}\n"
        f"              {rl.steps} steps in all, learning rate {rl.optimizer.lr:g}, rollouts at temperature "
        f"{rl.temperature:g}"
    )
    parts = [step, explain_objective(settings.objective, rl.max_response_tokens)]
    return "\n".join([*parts, "", _explain_critic(rl.critic)] if rl.critic is not None else parts)


def _explain_critic(critic: CriticConfig) -> str:
    clip = (
        ""
        if critic.value_clip is None
        else f"              or, where larger, that of V clipped to V_old +- {critic.value_clip:g}\n"
    )
    warmup = f"; only the critic is trained in the first {critic.warmup_steps} steps" if critic.warmup_steps else ""
    return (
        f"Critic        (V - return)^2 / 2; the mean over all response tokens\n{clip}"
        f"              learning rate {critic.optimizer.lr:g}{warmup}"
    )


def explain_sft(settings: SFTSettings) -> str:
    """The objective of SFT."""
    return "\n".join(explain_terms(settings.sft.objective.terms, max_response_tokens=0)).strip()


def _settings(stage: StageName, path: Path, overrides: Sequence[str]) -> object:
    values, _ = read_yaml(path)
    if "settings" in values and "stage" in values:
        job = read_job(path)
        if job.stage != stage:
            raise ConfigError(f"{path}: stage: is {job.stage!r}; use python -m luffy.stages.{job.stage}")
        return job.settings
    return _settings_in(load_experiment(path, overrides), stage, path)


def _settings_in(experiment: ExperimentConfig, stage: StageName, path: Path) -> object:
    if stage not in experiment.stages:
        raise ConfigError(
            f"{path}: stages: the chain has no stage {stage}, only {', '.join(experiment.stages)}; "
            f"choose another with chain=..."
        )
    return next(node.settings for node in build_graph(experiment) if node.stage == stage)


_EXPLAIN = ("sft", "rl")
