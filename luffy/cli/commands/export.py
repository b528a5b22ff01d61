"""`luffy export SOURCE TARGET`: a stage's policy as a Hugging Face folder, or the data of a run as a file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.api.runs import export_stage
from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.errors import EXIT_OK, ConfigError, DataError
from luffy.pipeline.graph import nodes_providing
from luffy.pipeline.manifest import MANIFEST_FILE
from luffy.pipeline.records import RunRecord, find_run
from luffy.pipeline.workspace import find_workspace

_MODEL = "model"
_TRAIN_FILE = "train.parquet"
_DATA_FILES = (".parquet", ".csv")


def export(
    source: Annotated[
        str,
        Argument(
            metavar="STAGE|RUN|FILE",
            help="a stage's directory (workspace/runs/RUN/stages/rl); for data a run's name or directory, an "
            "experiment's name for its newest run, or a prepared .parquet file",
        ),
    ],
    target: Annotated[
        Path,
        Argument(
            metavar="FOLDER|FILE", help="new or empty folder for the policy; new .parquet for traces, or .csv for data"
        ),
    ],
    step: Annotated[
        int | None, Option(metavar="N", help="a checkpoint's step [the final model, else the newest checkpoint]")
    ] = None,
    author: Annotated[
        list[str] | None, Option("--author", metavar="NAME", help="only traces of this author; may be repeated [all]")
    ] = None,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Write the policy of a training stage as a Hugging Face model folder, or a run's data as one file.

    A .parquet file gets the prompts with traces, those that teachers made included; a .csv file all prompts.
    """
    if target.suffix in _DATA_FILES:
        if step is not None:
            raise ConfigError(f"--step: chooses a policy; {target} gets data")
        is_file = source.endswith(".parquet") and Path(source).is_file()
        file = Path(source) if is_file else training_file(find_run(find_workspace(workspace), source))
        prompts, counts, hidden = write_data(file, target, author or ())
        by_author = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items())) or "none"
        say(
            f"{prompts} prompts with {counts.total()} traces ({by_author}) are in {target}; read them with data.train: "
            "{kind: file, ...}"
        )
        if hidden:
            say(f"{hidden} prompts are confidential and were left out")
        return EXIT_OK
    if author:
        raise ConfigError(f"--author: chooses traces, and {target} does not end in {' or '.join(_DATA_FILES)}")
    what = export_stage(Path(source), target, step)
    say(f"{what} of {source} is in {target}")
    return EXIT_OK


def training_file(record: RunRecord) -> Path:
    """The training prompts of the run's last finished stage that makes traces; DataError without one."""
    made = [record.stages[name].directory for name in nodes_providing("traces", record.stages)]
    finished = [path for path in made if (path / MANIFEST_FILE).is_file() and (path / _TRAIN_FILE).is_file()]
    if not finished:
        raise DataError(f"{record.name}: no stage with training data is finished; luffy show {record.name} lists them")
    return finished[-1] / _TRAIN_FILE


def write_data(source: Path, file: Path, authors: Sequence[str]) -> tuple[int, Counter[str], int]:
    """Write prompts of a prepared file to `file`, with the traces of `authors` (empty: of anyone).

    As .parquet only prompts that have one, as .csv without `authors` all. Returns the numbers of prompts, of traces by
    author, and of the confidential prompts left out. Raises DataError where none is left, and ConfigError for a file
    that exists and for an author without a trace.
    """
    from luffy.confidential import may_show_prompt
    from luffy.data.parquet import iterate_prompts, write_csv, write_prompts
    from luffy.types import Prompt

    if file.exists():
        raise ConfigError(f"{file}: exists already; give a new file")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder")
    known = Counter(trace.author for prompt in iterate_prompts(source) for trace in prompt.traces)
    unknown = [name for name in authors if name not in known]
    if unknown:
        raise ConfigError(f"--author {unknown[0]}: wrote no trace; authors are {', '.join(sorted(known)) or 'none'}")
    takes_all, counts, hidden = file.suffix == ".csv" and not authors, Counter[str](), 0

    def chosen() -> Iterator[Prompt]:
        nonlocal hidden
        for prompt in iterate_prompts(source):
            traces = tuple(trace for trace in prompt.traces if not authors or trace.author in authors)
            if not traces and not takes_all:
                continue
            if not may_show_prompt(prompt):
                hidden += 1
                continue
            counts.update(trace.author for trace in traces)
            yield replace(prompt, traces=traces)

    written = (write_csv if file.suffix == ".csv" else write_prompts)(file, chosen())
    if not written:
        file.unlink()
        raise DataError(f"{source}: has no {'prompt' if takes_all else 'trace'} that can be exported")
    return written, counts, hidden
