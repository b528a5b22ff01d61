"""What `flows/evaluate_checkpoint.py` is asked for: one model, or the checkpoints of an RL run."""

import argparse
from dataclasses import replace

from flows.front import Question, Work
from luffy.config import ExperimentConfig, load_experiment
from luffy.config.of_checkpoint import evaluation_of, sweep_of
from luffy.errors import ConfigError, DataError
from luffy.pipeline.checkpoints import complete_checkpoints
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

_EXAMPLES = """\
  python flows/evaluate_checkpoint.py exp_configs/arithmetic.yaml --model workspace/runs/arithmetic-1/stages/rl
  python flows/evaluate_checkpoint.py exp_configs/own_data.yaml --model Qwen/Qwen2.5-0.5B-Instruct
  python flows/evaluate_checkpoint.py exp_configs/arithmetic.yaml --steps 80,100
"""


def choose(config: ExperimentConfig, model: str | None, steps: tuple[int, ...], chat_template: str | None) -> Work:
    """What to run for one of `model` and `steps`; raises ConfigError for both, neither, or what does not fit."""
    if (model is None) == (not steps):
        raise ConfigError(
            "give one of --model (a folder or hub id) and --steps (of the experiment's RL run); as parameters of a "
            "deployment: model with steps=[], or steps alone"
        )
    if model is not None:
        parameters = {"model": model, "chat_template": chat_template}
        return Work(evaluation_of(config, model, chat_template), parameters=parameters)
    if chat_template is not None:
        raise ConfigError("--chat-template has no effect with --steps, whose models have that of their run; remove it")
    return Work(sweep_of(config, steps), steps, {"steps": list(steps)})


def check_checkpoints(work: Work, workspace: Workspace) -> None:
    """Raise DataError unless the RL run of a sweep is finished and has kept the checkpoints, or all is evaluated."""
    if not work.sweep_steps:
        return
    plans = {
        plan.node.name: plan for plan in open_experiment(work.config, workspace, sweep_steps=work.sweep_steps).plan()
    }
    if plans["sweep"].action == "reuse":
        return
    rl = plans["rl"]
    if rl.action != "reuse":
        reason = f"{rl.headline}: {rl.reason}" if rl.reason else rl.headline
        raise DataError(
            f"--steps: the RL run of {work.config.name} is not finished in {workspace.root} ({reason}); make it first, "
            "by flows/full_pipeline.py with the same experiment and overrides"
        )
    there = complete_checkpoints(rl.directory)
    missing = [step for step in work.sweep_steps if step not in there]
    if missing:
        raise DataError(
            f"--steps: {rl.directory} has no checkpoint of {_words(missing)}; there are: {_words(sorted(there))} "
            "(execution.checkpoint says how many a run keeps)"
        )


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def _steps(text: str) -> tuple[int, ...]:
    """`100,200,300`, in ascending order."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form 100,200,300") from None


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a Hugging Face folder, a stage's directory or a hub id")
    parser.add_argument("--steps", type=_steps, default=(), help="RL steps whose checkpoints are there, e.g. 100,200")
    parser.add_argument("--chat-template", help="of --model, in place of its own: a shipped name or a Jinja file")


def _work(options: argparse.Namespace) -> Work:
    config = load_experiment(options.config, options.overrides)
    work = choose(config, options.model, options.steps, options.chat_template)
    return replace(work, also_check=check_checkpoints)


QUESTION = Question(examples=_EXAMPLES, add_options=_add_options, work=_work)
