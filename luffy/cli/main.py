"""`python -m luffy`: looking at what is there and what would be done. Starts nothing, needs no Prefect; torch for
`export --step` alone.

python -m luffy plan exp_configs/arithmetic.yaml [key.path=value ...]
python -m luffy runs
python -m luffy export workspace/runs/arithmetic-1/stages/rl FOLDER [--step 40]
python -m luffy leaderboard [workspace]
python -m luffy rescore workspace/runs/arithmetic-1/stages/evaluate_rl --grader math_strict
python -m luffy diff workspace/runs/arithmetic-1/stages/evaluate_sft workspace/runs/arithmetic-1/stages/evaluate_rl
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from luffy.cli.console import memory_table, plan_table, show_error, terminal, text_table
from luffy.cli.export import export_stage
from luffy.cli.inventory import list_runs, list_stages
from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError, LuffyError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.resources import find_resources
from luffy.pipeline.workspace import Workspace, find_workspace


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = parse_with_overrides(_parser(), arguments)
    workspace = find_workspace(getattr(options, "folder_of_results", None) or options.workspace)
    try:
        if options.command == "plan":
            return show_plan(options.config, options.overrides, workspace, verify=options.verify)
        if options.command == "export":
            return export(Path(options.stage), Path(options.folder), options.step)
        if options.command == "leaderboard":
            return leaderboard(workspace)
        if options.command == "rescore":
            return rescore(Path(options.stage), options.grader, options.out, options.suite, options.show)
        if options.command == "diff":
            return diff(Path(options.first), Path(options.second), options.show)
        return show_runs(workspace)
    except LuffyError as error:
        if options.debug:
            raise
        show_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but `key.path=value` may also stand after options, which argparse alone refuses."""
    options, left = parser.parse_known_args(arguments)
    unknown = [text for text in left if text.startswith("-") or "=" not in text or "overrides" not in options]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options


def show_plan(config_file: str, overrides: Sequence[str], workspace: Workspace, *, verify: bool) -> int:
    """Print what a run would do with each stage, and why; under `cluster: ray` first what its GPUs would hold.

    Raises ConfigError, after the estimate, where that cannot fit.
    """
    config = load_experiment(config_file, overrides)
    return show_plan_of(config, workspace, verify=verify)


def show_plan_of(
    config: ExperimentConfig, workspace: Workspace, *, verify: bool, sweep_steps: tuple[int, ...] = ()
) -> int:
    """The same of an experiment that is loaded already."""
    show_resources(config, estimate=True)
    experiment = open_experiment(config, workspace, verify=verify, sweep_steps=sweep_steps)
    console = terminal()
    if config.cluster == "ray":
        console.print()
    console.print(f"workspace {workspace.root}", markup=False, soft_wrap=True)
    console.print(plan_table(experiment.plan()))
    return EXIT_OK


def show_resources(config: ExperimentConfig, *, estimate: bool) -> None:
    """Print what a run under `cluster: ray` asks of its machines, with or without the `estimate` of each GPU's memory.

    Raises ConfigError, a line a mistake, where they do not have it.
    """
    resources = find_resources(config)
    console = terminal()
    for gpu in resources.gpus if estimate else ():
        console.print(memory_table(gpu))
        console.print()
    for note in resources.notes:
        console.print(note, markup=False, soft_wrap=True)
    if resources.complaints:
        raise ConfigError("\n".join(resources.complaints))


def show_runs(workspace: Workspace) -> int:
    """Print the runs and the stage results in the workspace."""
    console = terminal()
    console.print(f"workspace {workspace.root}", markup=False, soft_wrap=True)
    console.print(text_table(["run", "state", "age", "stages"], list_runs(workspace), title="Runs"))
    console.print()
    header = ["stage", "key", "state", "age", "size", "used by"]
    console.print(text_table(header, list_stages(workspace), title="Stage results"))
    return EXIT_OK


def export(stage: Path, folder: Path, step: int | None) -> int:
    """Write the policy of a training stage as a Hugging Face folder."""
    what = export_stage(stage, folder, step)
    terminal().print(f"{what} of {stage} is in {folder}", markup=False, soft_wrap=True)
    return EXIT_OK


def leaderboard(workspace: Workspace) -> int:
    """Print every evaluated model of the workspace, and write the page and the data."""
    from luffy.cli.leaderboard import show_leaderboard, write_leaderboard  # plots: only when they are needed

    show_leaderboard(write_leaderboard(workspace), workspace.root)
    return EXIT_OK


def rescore(stage: Path, grader: str, out: str | None, suites: Sequence[str], limit: int) -> int:
    """Grade the saved responses of an evaluation again, and print what that changes."""
    from luffy.cli import evaluations  # numpy and pyarrow: only when they are needed

    done = evaluations.rescore(stage, grader, None if out is None else Path(out), suites)
    console = terminal()
    console.print(f"graded again by {grader}", markup=False, soft_wrap=True)
    console.print(text_table(evaluations.SCORE_HEADER, done.scores))
    if done.changed:
        console.print(f"\n{_shown(len(done.changed), limit)} responses with another verdict", markup=False)
        console.print(text_table(evaluations.CHANGED_HEADER, done.changed[:limit]))
    for note in done.notes:
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"written to {done.folder}", markup=False, soft_wrap=True)
    return EXIT_OK


def diff(first: Path, second: Path, limit: int) -> int:
    """Print how the second of two evaluations compares with the first, and the problems whose result changed."""
    from luffy.cli import evaluations  # as above

    changes = evaluations.diff(first, second)
    console = terminal()
    console.print(f"{second} minus {first}, in percentage points", markup=False, soft_wrap=True)
    console.print(text_table(evaluations.COMPARISON_HEADER, evaluations.comparison_rows(changes)))
    for suite, decoding in changes.left_out:
        console.print(f"{suite}, {decoding}: in one of the two alone", markup=False, soft_wrap=True)
    for part in changes.cells:
        rows = evaluations.problem_rows(part, limit)
        title = f"{', '.join(part.cell)}: {_shown(len(part.changed), limit)} changed"
        console.print()
        console.print(title, markup=False, soft_wrap=True)
        if rows:
            console.print(text_table(evaluations.PROBLEM_HEADER, rows))
        for remark in evaluations.remarks(part):
            console.print(remark, markup=False, soft_wrap=True)
    return EXIT_OK


def _shown(count: int, limit: int) -> str:
    return str(count) if count <= limit else f"{limit} of {count}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m luffy", description="Look at experiments and take models out of them; runs nothing."
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--workspace", help="default: $LUFFY_WORKSPACE, else ./workspace")
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", parents=[shared], help="what a run would do with each stage, and why")
    plan.add_argument("config", help="an experiment's YAML")
    plan.add_argument("overrides", nargs="*", metavar="key.path=value", help="fields to override")
    plan.add_argument("--verify", action="store_true", help="compare full hashes of all outputs")
    commands.add_parser("runs", parents=[shared], help="experiments and stage results in the workspace")
    export = commands.add_parser("export", parents=[shared], help="the policy of a training stage as a model folder")
    export.add_argument("stage", help="a stage's directory, e.g. workspace/runs/arithmetic-1/stages/rl")
    export.add_argument("folder", help="where to write; not there yet, or empty")
    export.add_argument(
        "--step", type=int, help="of a checkpoint; default: the final model, else the newest checkpoint"
    )
    board = commands.add_parser(
        "leaderboard", parents=[shared], help="every evaluated model by suite, with intervals; also as a page"
    )
    board.add_argument("folder_of_results", nargs="?", metavar="workspace", help="as --workspace")
    rescore = commands.add_parser("rescore", parents=[shared], help="grade an evaluation's responses by another grader")
    rescore.add_argument("stage", help="a finished evaluation, e.g. workspace/runs/arithmetic-1/stages/evaluate_rl")
    rescore.add_argument("--grader", required=True, help="math, math_strict, choice, exact, or a kind in YAML")
    rescore.add_argument("--out", help="folder to write to; default: rescored/GRADER below the evaluation")
    rescore.add_argument("--suite", action="append", default=[], help="only this one; may be repeated")
    diff = commands.add_parser("diff", parents=[shared], help="two evaluations, and the problems that changed")
    diff.add_argument("first", help="a finished evaluation")
    diff.add_argument("second", help="another one, with the same suites")
    for command in (rescore, diff):
        command.add_argument("--show", type=int, default=20, metavar="N", help="list N changes at most (20)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
