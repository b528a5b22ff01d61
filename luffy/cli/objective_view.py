"""The objective of each training stage, in words and symbols: what `luffy config --explain` prints."""

from collections.abc import Sequence
from pathlib import Path

from luffy.config import load_experiment
from luffy.config.settings import RLSettings, SFTSettings, StageSettings
from luffy.config.shipped import experiment_file
from luffy.config.training import CriticConfig
from luffy.config.yaml_source import read_yaml
from luffy.errors import ConfigError
from luffy.objectives.explain import explain_objective, explain_terms
from luffy.pipeline.graph import build_graph
from luffy.pipeline.job import read_job


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
        settings: dict[str, StageSettings] = {job.stage: job.settings}
    else:
        settings = {node.name: node.settings for node in build_graph(load_experiment(config, overrides))}
    found = {name: text for name, of in settings.items() if (text := _explain(of)) is not None}
    if not found:
        raise ConfigError(f"{config}: has no training stage (sft, rl) to explain")
    if only is not None and only not in found:
        raise ConfigError(f"{config}: has no training stage {only!r}; there are {', '.join(found)}")
    return [(name, text) for name, text in found.items() if only in (None, name)]


def _explain(settings: StageSettings) -> str | None:
    """The explanation of a training stage; None of any other."""
    if isinstance(settings, RLSettings):
        return _explain_rl(settings)
    return _explain_sft(settings) if isinstance(settings, SFTSettings) else None


def _explain_rl(settings: RLSettings) -> str:
    """The shape of its steps and their objective."""
    rl = settings.rl
    updates = f"{rl.updates_per_step} optimizer steps"
    if rl.passes > 1:
        updates += f" ({rl.passes} passes over its groups)"
    if rl.updates_per_step == 1:
        updates = "1 optimizer step (so pi_old is the policy itself: r = 1, and clips of r never act)"
    step = (
        f"Step          {rl.prompts_per_step} prompts, {updates}\n"
        f"              {rl.steps} steps in all, learning rate {rl.optimizer.lr:g}, rollouts at temperature "
        f"{rl.temperature:g}"
    )
    if rl.stop:
        step += f"\n              a rollout ends with the stop token or with {' or '.join(map(repr, rl.stop))}"
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


def _explain_sft(settings: SFTSettings) -> str:
    return "\n".join(explain_terms(settings.sft.objective.terms, max_response_tokens=0)).strip()
