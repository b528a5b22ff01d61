"""`luffy export SOURCE TARGET`: the policy of a run or stage as a Hugging Face folder, or a run's data as a file."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from luffy.api.runs import export_stage
from luffy.cli.commands.config import explain_stage
from luffy.cli.console import say
from luffy.cli.options import Debug, WorkspaceFolder
from luffy.config.chain import plain_stages
from luffy.config.yaml_source import dump_yaml
from luffy.errors import EXIT_OK, ConfigError, DataError, LuffyError
from luffy.files import write_atomic
from luffy.pipeline.graph import build_graph, providing
from luffy.pipeline.job import JOB_FILE
from luffy.pipeline.manifest import MANIFEST_FILE
from luffy.pipeline.records import RunRecord, find_run
from luffy.pipeline.workspace import find_workspace

_MODEL = "model"
_CARD = "README.md"
_EXPERIMENT = "experiment.yaml"
_TRACED_FILES = ("train.parquet", "sampled.parquet")
"""Prompts with their traces, in the result of prepare_data or of sample with teachers, and of sample by the policy."""


def export(
    source: Annotated[
        str,
        Argument(
            metavar="STAGE|RUN|FILE",
            help="a run's name or directory, an experiment's name for its newest run, a stage's directory "
            "(workspace/runs/RUN/stages/rl), or, for data, a prepared .parquet file",
        ),
    ],
    target: Annotated[
        Path,
        Argument(metavar="FOLDER|FILE", help="new or empty folder for the policy, or a new .parquet file for traces"),
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
    """Write a policy as a Hugging Face model folder, or a run's data as one file.

    That of a run is its last one; the folder also gets a model card and the experiment that makes it again.
    A .parquet file gets the prompts with traces, also those that teachers or the policy made.
    """
    if target.suffix == ".parquet":
        if step is not None:
            raise ConfigError(f"--step: is for a policy; {target} gets data")
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
    if target.suffix in (".json", ".jsonl", ".csv"):
        raise ConfigError(f"{target}: data are written as .parquet, and a policy to a folder")
    if author:
        raise ConfigError(f"--author: chooses traces, and {target} does not end in .parquet")
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        found = "not empty" if target.is_dir() else "a file"
        raise DataError(f"{target}: is {found}; give a folder that is not there yet")
    stage, record, node = Path(source), None, ""
    if not (stage / JOB_FILE).is_file():
        record = find_run(find_workspace(workspace), source)
        made = providing("policy", record.kinds)
        if not made:
            raise DataError(f"{record.name}: has no policy yet; luffy show {record.name} lists its stages")
        node = made[-1]
        stage = record.stages[node].directory
    what = export_stage(stage, target, step)
    if record is not None:
        try:
            write_card(record, node, target)
        except LuffyError as error:
            say(f"no model card: {error}")
    say(f"{what} of {source} is in {target}")
    return EXIT_OK


def write_card(record: RunRecord, node: str, folder: Path) -> None:
    """Write README.md and the run's experiment beside the policy of `node`; LuffyError where nothing is evaluated."""
    from luffy.report.chain_page import model_card, read_chain  # draws, and loads what draws

    config = record.configuration
    if config is None:
        raise DataError("the run's configuration was written by another version")
    write_atomic(folder / _EXPERIMENT, dump_yaml(config.model_dump(mode="json")))
    nodes = build_graph(config)
    trained = [(each.name, text) for each in nodes if (text := explain_stage(each.settings)) is not None]
    if "evaluate" not in config.kinds:
        raise DataError("it shows accuracies, and the run has no stage evaluate")
    page = plain_stages(() if "report" in config.kinds else ("report",))
    whole = config.model_copy(update={"stages": config.stages | page})
    reader = next(each for each in build_graph(whole) if each.kind.reads_all)
    there = {entry: record.stages[name].directory for entry, name in reader.inputs.items() if name in record.stages}
    chain = read_chain(whole, {entry: path for entry, path in there.items() if (path / MANIFEST_FILE).is_file()})
    write_atomic(folder / _CARD, model_card(chain, node, trained, _EXPERIMENT))


def training_file(record: RunRecord) -> Path:
    """The training prompts of the run's last finished stage that makes traces; DataError without one."""
    made = [record.stages[name].directory for name in providing("traces", record.kinds)]
    finished = [path for path in made if (path / MANIFEST_FILE).is_file()]
    files = [file for path in finished for name in _TRACED_FILES if (file := path / name).is_file()]
    if not files:
        raise DataError(f"{record.name}: no stage with training data is finished; luffy show {record.name} lists them")
    return files[-1]


def write_data(source: Path, file: Path, authors: Sequence[str]) -> tuple[int, Counter[str], int]:
    """Write the prompts of a prepared file that have a trace of `authors` (empty: of anyone) to `file`, with these.

    Returns the numbers of prompts, of traces by author, and of the confidential prompts left out. Raises DataError
    where none is left, and ConfigError for a file that exists and for an author without a trace.
    """
    from luffy.confidential import may_show_prompt
    from luffy.data.parquet import iterate_prompts, write_prompts
    from luffy.types import Prompt

    if file.exists():
        raise ConfigError(f"{file}: exists already; give a new file")
    if not file.parent.is_dir():
        raise ConfigError(f"{file.parent}: no such folder")
    known = Counter(trace.author for prompt in iterate_prompts(source) for trace in prompt.traces)
    unknown = [name for name in authors if name not in known]
    if unknown:
        raise ConfigError(f"--author {unknown[0]}: wrote no trace; authors are {', '.join(sorted(known)) or 'none'}")
    counts, hidden = Counter[str](), 0

    def chosen() -> Iterator[Prompt]:
        nonlocal hidden
        for prompt in iterate_prompts(source):
            traces = tuple(trace for trace in prompt.traces if not authors or trace.author in authors)
            if not traces:
                continue
            if not may_show_prompt(prompt):
                hidden += 1
                continue
            counts.update(trace.author for trace in traces)
            yield replace(prompt, traces=traces)

    written = write_prompts(file, chosen())
    if not written:
        file.unlink()
        raise DataError(f"{source}: has no trace that can be exported")
    return written, counts, hidden
