"""`luffy export-environment RUN FOLDER`: problems, environment and graders as a task set of the package verifiers."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK, DataError
from luffy.pipeline.chain.manifest import MANIFEST_FILE
from luffy.pipeline.workspace import find_workspace
from luffy.pipeline.workspace.records import RunRecord, find_run

_PREPARED, _TRAIN = "prepare_data", "train"


def export_environment(
    run: Annotated[str, Argument(help="a run's name or directory, or an experiment's name for its newest run")],
    folder: Annotated[Path, Argument(metavar="FOLDER", help="output folder; has to be new or empty")],
    name: Annotated[
        str | None, Option(metavar="NAME", help="the task set's id and module [luffy_ and the experiment's name]")
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Write the problems of a run with their environment and graders as a task set of verifiers 0.4.0.

    `luffy prepare EXPERIMENT` makes a run with the data alone.
    """
    record = find_run(find_workspace(workspace), run)
    data = prepared_data(record)
    from luffy.data.parquet import read_prompts  # late, with the next: they load pyarrow
    from luffy.environments.exported.export_folder import PlayedAndGraded, write_export

    try:
        played = PlayedAndGraded.of(record.config)
    except ValueError:
        raise DataError(f"{record.name}: was made by another version of luffy; prepare its data again") from None
    files = {_TRAIN: data / "train.parquet"} | {file.stem: file for file in sorted((data / "suites").glob("*.parquet"))}
    splits = {split: read_prompts(file) for split, file in files.items() if file.is_file()}
    chosen = name or f"luffy_{record.experiment}".replace(".", "_").replace("-", "_")
    written = write_export(played, splits, folder, chosen)
    counts = ", ".join(f"{count} of {split}" for split, count in written.counts.items())
    say(
        f"{counts} are in {folder}; install it in the environment that has verifiers (pip install {folder}), and run "
        f"its task set {chosen}"
    )
    if written.num_hidden:
        say(f"{written.num_hidden} problems are confidential and were left out")
    return EXIT_OK


def prepared_data(record: RunRecord) -> Path:
    """The directory of the run's prepared data; DataError where it is not finished."""
    entry = record.stages.get(_PREPARED)
    if entry is None or not (entry.directory / MANIFEST_FILE).is_file():
        raise DataError(f"{record.name}: its data is not prepared; run luffy prepare EXPERIMENT first")
    return entry.directory
