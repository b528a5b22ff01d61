"""`luffy export SOURCE TARGET`: a stage's policy as a Hugging Face folder, or the traces of a run as a data set."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.config.model import copy_model_files
from luffy.config.settings import RLSettings, SFTSettings
from luffy.errors import EXIT_OK, ConfigError, DataError
from luffy.pipeline.graph import nodes_providing
from luffy.pipeline.job import inputs_of, read_job
from luffy.pipeline.manifest import MANIFEST_FILE
from luffy.pipeline.records import RunRecord, find_run
from luffy.pipeline.reuse import complete_checkpoints
from luffy.pipeline.workspace import find_workspace

_MODEL = "model"
_TRAIN_FILE = "train.parquet"


def export(
    source: Annotated[
        str,
        Argument(
            metavar="STAGE|RUN",
            help="a stage's directory (workspace/runs/RUN/stages/rl); for traces a run's name or directory, or an "
            "experiment's name for its newest run",
        ),
    ],
    target: Annotated[
        Path,
        Argument(metavar="FOLDER|FILE", help="new or empty folder for the policy, or new .parquet file for traces"),
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
    """Write the policy of a training stage as a Hugging Face model folder, or a run's traces as a dataset.

    Traces, those that teachers made included, are written where the target ends in .parquet.
    """
    if target.suffix == ".parquet":
        if step is not None:
            raise ConfigError(f"--step: chooses a policy; {target} gets traces")
        counts, hidden = write_traces(find_run(find_workspace(workspace), source), target, author or ())
        by_author = ", ".join(f"{count} of {name}" for name, count in sorted(counts.items()))
        say(f"{counts.total()} traces ({by_author}) are in {target}; read them with data.train: {{kind: file, ...}}")
        if hidden:
            say(f"{hidden} prompts are confidential and were left out")
        return EXIT_OK
    if author:
        raise ConfigError(f"--author: chooses traces, and {target} does not end in .parquet")
    what = export_stage(Path(source), target, step)
    say(f"{what} of {source} is in {target}")
    return EXIT_OK


def export_stage(stage: Path, folder: Path, step: int | None) -> str:
    """Write the policy of the stage in the directory `stage` to `folder`; returns what it was.

    Without `step` this is its final model, or the newest checkpoint of an unfinished stage. Raises DataError when there
    is nothing to write, or the folder is not empty.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        found = "not empty" if folder.is_dir() else "a file"
        raise DataError(f"{folder}: is {found}; give a folder that is not there yet")
    if not (stage / "config.yaml").is_file():
        raise DataError(f"{stage}: is no stage directory; give workspace/stages/rl/KEY or workspace/runs/RUN/stages/rl")
    if step is None and (stage / MANIFEST_FILE).is_file() and (stage / _MODEL).is_dir():
        copy_model_files(stage / _MODEL, folder, str(stage))
        return "the final model"
    job = read_job(stage / "config.yaml")
    if not isinstance(job.settings, RLSettings | SFTSettings):
        raise DataError(f"{stage}: only checkpoints of sft and rl can be exported, this is {job.stage}")
    checkpoints = complete_checkpoints(stage)
    if not checkpoints or (step is not None and step not in checkpoints):
        there = ", ".join(map(str, sorted(checkpoints))) or "none"
        raise DataError(f"{stage}: no checkpoint of step {step if step is not None else 'any'}; there are: {there}")
    chosen = max(checkpoints) if step is None else step
    from luffy.training.checkpoint import export_checkpoint  # torch: only when it is needed

    export_checkpoint(
        checkpoints[chosen],
        stage=stage,
        tokenizer=inputs_of(job, stage)["data"] / "tokenizer",
        dtype=job.settings.dtype,
        folder=folder,
    )
    return f"the checkpoint of step {chosen}"


def write_traces(record: RunRecord, file: Path, authors: Sequence[str]) -> tuple[Counter[str], int]:
    """Write the prompts that have traces of `authors` (empty: of anyone), with these traces, to `file`.

    They are those of the run's last finished stage that makes traces. Returns the number of traces by author, and of
    the confidential prompts left out. Raises DataError without a trace, and ConfigError for a file that exists and
    for an author without a trace.
    """
    from luffy.confidential import may_show_prompt
    from luffy.data.parquet import iterate_prompts, write_prompts
    from luffy.types import Prompt

    made = [record.stages[name].directory for name in nodes_providing("traces", record.stages)]
    finished = [path for path in made if (path / MANIFEST_FILE).is_file() and (path / _TRAIN_FILE).is_file()]
    if not finished:
        raise DataError(f"{record.name}: no stage with training data is finished; luffy show {record.name} lists them")
    folder = finished[-1]
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
