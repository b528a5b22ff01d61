"""`luffy show`: a workspace, or one run from its configuration and the raw data to metrics and samples."""

from textwrap import indent
from typing import Annotated

from typer import Argument, Option

from luffy.api.sample_view import HISTORY_HEADER, prompt_history, read_range, samples_of
from luffy.cli import run_view
from luffy.cli.console import say, show_rows, show_table, terminal
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK, ConfigError, DataError
from luffy.evaluation.across_runs.all_results import read_leaderboard
from luffy.files import write_atomic
from luffy.pipeline.manifest import read_manifest
from luffy.pipeline.records import RunRecord, find_run, read_run
from luffy.pipeline.workspace import Workspace, find_workspace
from luffy.report.evaluation_page import MARK, leaderboard_page
from luffy.report.page import html


def show(
    run: Annotated[
        str | None,
        Argument(
            help="a run's name or directory, or an experiment's name for its newest run [list all runs and results]",
            show_default=False,
        ),
    ] = None,
    leaderboard: Annotated[
        bool, Option("--leaderboard", help="instead: every evaluated model of the workspace; also as a page")
    ] = False,
    everything: Annotated[bool, Option("--all", help="also fields at their defaults, and every metric")] = False,
    samples: Annotated[int | None, Option(min=1, metavar="N", help="instead: N samples with their grades")] = None,
    stage: Annotated[
        str | None, Option(metavar="STAGE", help="stage of the samples [rl, else the last evaluation]")
    ] = None,
    reward: Annotated[
        str | None, Option(metavar="LOW..HIGH", help="samples with this reward: 1, 0..0.5, 0.5..")
    ] = None,
    prompt: Annotated[
        str | None, Option(metavar="UID", help="instead: the rollouts of one prompt, step by step")
    ] = None,
    tag: Annotated[
        list[str] | None, Option(metavar="TAG", help="list the runs with this tag (tracking.tags); may be repeated")
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Show one run: configuration, stages, lineage, metrics, accuracies, samples, one prompt's history.

    Without a run: what the workspace holds, or its leaderboard.
    """
    where = find_workspace(workspace)
    if run is None or leaderboard:
        asked = (samples, stage, reward, prompt)
        if leaderboard and (left_out := run or ("--tag" if tag else None)):
            raise ConfigError(f"--leaderboard ranks the whole workspace: leave out {left_out}")
        if everything or any(value is not None for value in asked):
            raise ConfigError("RUN: missing; luffy show lists the runs")
        if leaderboard:
            _show_leaderboard(where)
            return EXIT_OK
        say(f"workspace {where.root}")
        runs, results = run_view.take_stock(where, tag or ())
        show_table(runs, "Runs", apart=False)
        if not tag:
            show_table(results, "Stage results")
        return EXIT_OK
    if tag:
        raise ConfigError(f"--tag lists runs: leave out {run}")
    if prompt is not None and samples is not None:
        raise ConfigError("--prompt and --samples show different things: give one of them")
    if samples is None and any(value is not None for value in (reward, stage)):
        raise ConfigError("--stage and --reward choose among samples: give --samples N, too")
    record = find_run(where, run)
    if samples is not None:
        _show_samples(record, stage, reward or "-inf..", samples)
    elif prompt is not None:
        whole, rows = prompt_history(record, prompt)
        show_rows(HISTORY_HEADER, rows, f"Responses to {whole}")
    else:
        _show_run(record, everything=everything)
    return EXIT_OK


def _show_samples(record: RunRecord, stage: str | None, reward: str, number: int) -> None:
    low, high = read_range(reward)
    found = samples_of(record, stage, (low, high), number)
    for each in found:
        parts = {"prompt": each.prompt, "response": each.response, "reference": each.reference}
        shown = {name: indent(text, 4 * " ") for name, text in parts.items() if text or name != "reference"}
        say("\n".join((each.heading, *(f"  {name}:\n{text}" for name, text in shown.items()), "")))
    if len(found) < number:
        say(f"{len(found)} samples, there are no more with a reward in [{low:g}, {high:g}]")


def _show_run(record: RunRecord, *, everything: bool) -> None:
    by = f" by pid {record.pid} on {record.host}" if record.pid is not None else ""
    say(f"{record.name}: {record.condition}{by}, started {record.started or '?'}, updated {record.updated or '?'}")
    say(f"directory {record.directory}")
    for page in sorted(record.directory.glob("*.html")):
        say(f"page {page}")
    if record.arms:
        rows = [[arm, folder.name, read_run(folder).condition] for arm, folder in record.arms.items()]
        show_rows(["arm", "run", "state"], rows, "\nArms")
    if (config := record.configuration) is not None:
        run_view.show_settings(config, everything=everything)
    elif record.config:
        say("\nits configuration was written by another version, so its defaults are unknown")
    show_table(run_view.stages_of(record), "Stages")
    show_table(run_view.lineage(record), "Lineage")
    if (metrics := run_view.last_metrics(record, everything=everything)).rows:
        show_table(metrics, "Newest metrics")
    finished = (entry.directory for entry in record.stages.values() if read_manifest(entry.directory) is not None)
    run_view.show_results(finished, config=config)


def _show_leaderboard(workspace: Workspace) -> None:
    """Write the page into the workspace, and print the tables and where the page is.

    Raises DataError when the workspace has no finished evaluation.
    """
    if not workspace.root.is_dir():
        raise DataError(f"workspace {workspace.root}: no such folder; give another with --workspace")
    board, file = read_leaderboard(workspace), workspace.root / "leaderboard.html"
    page = leaderboard_page(board, str(workspace.root))
    write_atomic(file, html(page))
    console = terminal()
    for table, section in zip(board.tables, page.sections[1:], strict=False):
        (accuracies,) = section.tables
        title = f"{section.title}; {section.aside}" + (f" ({table.note})" if table.note else "")
        console.print(title, markup=False, soft_wrap=True, style="bold")
        rows = [["\n".join((cell.text, *cell.details)) for cell in row] for row in accuracies.rows]
        show_rows(accuracies.header, rows)
        console.print()
    for directory, reason in board.left_out.items():
        say(f"left out: {directory}: {reason}")
    say(
        f"Accuracy in % with its interval over problems. {MARK}: clearly better than the next row on that suite "
        "(paired over problems, Holm's correction over suites); without it the first ones are not distinguishable."
    )
    say(f"leaderboard: {file}")
