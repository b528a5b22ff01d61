"""`luffy config CONFIG`: the resolved configuration with each value's origin, or what it minimises."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

from typer import Option

from luffy.cli.console import say, show_rows
from luffy.cli.options import Debug, Overrides, config_argument
from luffy.config import load_experiment
from luffy.config.fields import all_fields
from luffy.config.given import STAGES
from luffy.config.load import ResolvedExperiment, resolve_experiment
from luffy.config.settings import RLSettings, SFTSettings, StageSettings
from luffy.config.shipped import DATA, EXPERIMENTS, PresetKind, experiment_file
from luffy.config.yaml_source import KeyPath, flow_yaml, read_yaml
from luffy.errors import EXIT_OK, ConfigError
from luffy.objectives.explain import explain_objective, explain_terms
from luffy.pipeline.graph import build_graph
from luffy.pipeline.job import read_job

_COLUMN = 48
"""Where comments begin, after shorter values."""
_PRESETS = get_args(PresetKind)


def config(
    config: Annotated[
        str | None,
        config_argument("YAML file of an experiment, or the name of a shipped one; with --fields a section such as rl"),
    ] = None,
    overrides: Overrides = None,
    given: Annotated[bool, Option("--given", help="leave out fields at their defaults")] = False,
    fields: Annotated[
        bool, Option("--fields", help="list the fields of an experiment, or of the section given, with their meaning")
    ] = False,
    explain: Annotated[
        bool, Option("--explain", help="instead: what SFT and RL minimise, in words and symbols; also of a stage's job")
    ] = False,
    debug: Debug = False,
) -> int:
    """Print an experiment with every value resolved, and where each value comes from.

    The output is a YAML file of the same experiment.
    """
    if fields:
        found = all_fields(config or "")
        if not found:
            raise ConfigError(f"{config}: no such field; luffy config --fields lists all")
        rows = [(field.path, field.type, field.default or "", field.description) for field in found]
        show_rows(("field", "type", "default", "meaning"), rows)
        return EXIT_OK
    if config is None:
        raise ConfigError("CONFIG: missing; give an experiment, or --fields")
    if explain:
        for title, text in explain_experiment(config, overrides or ()).items():
            say(f"{title}\n\n{text}\n")
        return EXIT_OK
    for line in resolved_lines(resolve_experiment(config, overrides or ()), defaults=not given):
        say(line)
    return EXIT_OK


def resolved_lines(resolved: ResolvedExperiment, *, defaults: bool = True) -> Iterator[str]:
    """The lines of a YAML file that describes the same experiment, with or without values at their `defaults`."""

    def lines(values: Mapping[str, object], path: KeyPath) -> Iterator[str]:
        for key, value in values.items():
            here, name = (*path, str(key)), flow_yaml(key)
            if not defaults and resolved.origin_of(here) is None:
                continue
            if isinstance(value, dict):
                below = [f"  {line}" for line in lines(value, here)]
                yield from [f"{name}:", *below] if below else [commented(f"{name}: {{}}", here)]
            elif isinstance(value, list) and any(isinstance(element, dict) for element in value):
                yield f"{name}:"
                for index, element in enumerate(value):
                    place = here if here == (STAGES,) else (*here, str(index))  # stages go by their names
                    if isinstance(element, dict):
                        yield from (f"  {'  ' if n else '- '}{line}" for n, line in enumerate(lines(element, place)))
                    else:
                        yield f"  {commented(f'- {flow_yaml(element)}', place)}"
            else:
                yield commented(f"{name}: {flow_yaml(value)}", here)

    def commented(text: str, path: KeyPath) -> str:
        return f"{text:<{_COLUMN - 2 * (len(path) - 1)}}  # {_words(resolved.origin_of(path))}"

    return lines(resolved.config.model_dump(mode="json"), ())


def _words(origin: str | None) -> str:
    """`preset methods/luffy.yaml:26`, `exp_configs/smoke.yaml:3`, `my.yaml:12`, `command line`, `default`."""
    if origin is None:
        return "default"
    path = Path(origin)
    for folder in (EXPERIMENTS, DATA):
        if path.is_relative_to(folder):
            within = path.relative_to(folder)
            return f"preset {within}" if within.parent.name in _PRESETS else str(folder.name / within)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else origin


def explain_experiment(config: Path | str, overrides: Sequence[str] = ()) -> dict[str, str]:
    """The explanation of each training stage in an experiment's chain, or of the one stage in its `config.yaml`.

    Raises ConfigError when there is no training stage.
    """
    path = experiment_file(config)
    values, _ = read_yaml(path)
    if "settings" in values and "stage" in values:
        job = read_job(path)
        settings: dict[str, StageSettings] = {job.stage: job.settings}
    else:
        settings = {node.name: node.settings for node in build_graph(load_experiment(config, overrides))}
    found = {name: text for name, of in settings.items() if (text := explain_stage(of)) is not None}
    if not found:
        raise ConfigError(f"{config}: has no training stage (sft, rl) to explain")
    return found


def explain_stage(settings: StageSettings) -> str | None:
    """The loss of a training stage in symbols; None for another stage."""
    if isinstance(settings, SFTSettings):
        text = "\n".join(explain_terms(settings.sft.objective.terms, max_response_tokens=0)).strip()
        phase = settings.sft.steps_per_phase
        return f"{text}\n\nSymbols       A = 1; pi_old: the policy before each {phase} steps" if phase > 1 else text
    if not isinstance(settings, RLSettings):
        return None
    rl, critic = settings.rl, settings.rl.critic
    updates = f"{rl.updates_per_step} optimizer steps"
    if rl.passes > 1:
        updates += f" ({rl.passes} passes over its groups)"
    if rl.updates_per_step == 1:
        updates = "1 optimizer step (so pi_old is the policy itself: r = 1, and clips of r never act)"
    lines = [
        f"Step          {rl.prompts_per_step} prompts, {updates}",
        f"              {rl.steps} steps in all, learning rate {rl.optimizer.lr:g}, rollouts at temperature "
        f"{rl.temperature:g}",
    ]
    if rl.stop:
        lines.append(f"              a rollout ends with the stop token or with {' or '.join(map(repr, rl.stop))}")
    lines.append(explain_objective(settings.objective, rl.max_response_tokens))
    for name, teacher in rl.teachers.items():
        rows = "" if teacher.rows is None and len(rl.teachers) == 1 else f" on {teacher.rows_in_words}"
        lines += ["", f"Teacher       q{rows}: {teacher.formula()} (rl.teachers.{name})"]
    if critic is not None:
        lines += ["", "Critic        (V - return)^2 / 2; the mean over all response tokens"]
        if critic.value_clip is not None:
            lines.append(f"              or, where larger, that of V clipped to V_old +- {critic.value_clip:g}")
        warmup = f"; only the critic is trained in the first {critic.warmup_steps} steps" if critic.warmup_steps else ""
        lines.append(f"              learning rate {critic.optimizer.lr:g}{warmup}")
    return "\n".join(lines)
