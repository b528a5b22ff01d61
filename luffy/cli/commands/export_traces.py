"""`luffy export-traces RUN FILE`: the traces of a run's training data as a dataset that `data.train` reads."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK, ConfigError, DataError
from luffy.pipeline.chain.graph import nodes_providing
from luffy.pipeline.chain.manifest import MANIFEST_FILE
from luffy.pipeline.workspace import find_workspace
from luffy.pipeline.workspace.records import RunRecord, find_run

_TRAIN_FILE = "train.parquet"


def export_traces(
    run: Annotated[str, Argument(help="a run's name or directory, or an experiment's name for its newest run")],
    file: Annotated[Path, Argument(metavar="FILE", help="new .parquet file to write")],
    author: Annotated[
        list[str] | None, Option("--author", metavar="NAME", help="only traces of this author; may be repeated [all]")
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Write the traces of a run, those that teachers made included, as a dataset."""
    record = find_run(find_workspace(workspace), run)
    counts, hidden = write_traces(folder_of_traces(record), file, author or ())
    by_author = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
    say(f"{sum(counts.values())} traces ({by_author}) are in {file}; read them with data.train: {{kind: file, ...}}")
    if hidden:
        say(f"{hidden} prompts are confidential and were left out")
    return EXIT_OK


def folder_of_traces(record: RunRecord) -> Path:
    """The directory of the run's last finished stage that makes traces; DataError without one."""
    made = [record.stages[name].directory for name in nodes_providing("traces", record.stages)]
    finished = [path for path in made if (path / MANIFEST_FILE).is_file() and (path / _TRAIN_FILE).is_file()]
    if not finished:
        raise DataError(f"{record.name}: no stage with training data is finished; luffy show {record.name} lists them")
    return finished[-1]


def write_traces(folder: Path, file: Path, authors: Sequence[str] = ()) -> tuple[Counter[str], int]:
    """Write the prompts of `folder` that have traces of `authors` (empty: of anyone), with these traces, to `file`.

    Returns the number of traces by author, and of the confidential prompts left out. Raises ConfigError for a file that
    exists or has another ending, and for an author without a trace.
    """
    from luffy.confidential import may_show_prompt
    from luffy.data.parquet import iterate_prompts, write_prompts
    from luffy.types import Prompt

    if file.suffix != ".parquet":
        raise ConfigError(f"{file}: must end in .parquet")
    if file.exists():
        raise ConfigError(f"{file}: exists already; give a new file")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder")
    known = Counter(trace.author for prompt in iterate_prompts(folder / _TRAIN_FILE) for trace in prompt.traces)
    unknown = [name for name in authors if name not in known]
    if unknown:
        raise ConfigError(f"--author {unknown[0]}: wrote no trace; authors are {', '.join(sorted(known)) or 'none'}")
    counts, hidden = Counter[str](), 0

    def chosen() -> Iterator[Prompt]:
        nonlocal hidden
        for prompt in iterate_prompts(folder / _TRAIN_FILE):
            traces = tuple(trace for trace in prompt.traces if not authors or trace.author in authors)
            if traces and not may_show_prompt(prompt):
                hidden += 1
            elif traces:
                counts.update(trace.author for trace in traces)
                yield replace(prompt, traces=traces)

    write_prompts(file, chosen())
    if not counts:
        file.unlink()
        raise DataError(f"{folder}: has no trace that can be exported")
    return counts, hidden
