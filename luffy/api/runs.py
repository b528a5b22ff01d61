"""Runs from Python: start one, and read what it has made.

    run = luffy.run("arithmetic", method="on_policy", **{"rl.steps": 50})
    run.metrics.loc["rl"]["reward/mean"].plot()

A run is a process of its own, `python -m luffy run`, so that it is the same as on the command line, and needs neither a
notebook without an event loop nor a script with `if __name__ == "__main__"`.
"""

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.model import copy_model_files
from luffy.config.settings import RLSettings, SFTSettings
from luffy.config.yaml_source import Value, dump_yaml, flow_yaml
from luffy.errors import EXIT_OK, EXIT_USER_ERROR, DataError, LuffyError, UserError
from luffy.json_text import parse_json
from luffy.pipeline.graph import providing
from luffy.pipeline.job import JOB_FILE, inputs_of, read_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunCondition, RunRecord, list_records, read_run
from luffy.pipeline.reuse import complete_checkpoints
from luffy.pipeline.workspace import find_workspace
from luffy.processes import die_with
from luffy.tracking.metrics import METRICS_FILE, read_metrics

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from luffy.api.sample_view import ShownSample

_MODEL = "model"
_RESULTS_FILE = "results.json"
_SHOWN = 2_000
"""Characters at the end of a traceback that an exception's message repeats."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The accuracy of a checkpoint on a suite under a decoding."""

    checkpoint: str
    suite: str
    decoding: str
    accuracy: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Run:
    """A run of an experiment, finished or not. Everything is read from its files at each access."""

    directory: Path

    @property
    def record(self) -> RunRecord:
        """Its stages with their keys, directories and reasons, its configuration and its times."""
        return read_run(self.directory)

    @property
    def name(self) -> str:
        """The name by which the command line finds it: `luffy show NAME`."""
        return self.directory.name

    @property
    def state(self) -> RunCondition:
        """`finished`, `failed`, `interrupted`, `running`, or `killed`."""
        return self.record.condition

    @property
    def metrics(self) -> "pd.DataFrame":
        """A row for each step of each stage that trains, a column for each metric (`reward/mean`).

        The index is (`stage`, `step`): `run.metrics.loc["rl"]` is one stage.
        """
        import pandas as pd  # loads for half a second

        found = {node: read_metrics(stage.directory / METRICS_FILE) for node, stage in self.record.stages.items()}
        rows = [{"stage": node, **row} for node, lines in found.items() for row in lines]
        return pd.DataFrame(rows, columns=None if rows else ["stage", "step"]).set_index(["stage", "step"])

    @property
    def accuracies(self) -> "pd.DataFrame":
        """A row for each evaluated checkpoint, suite and decoding; accuracies and bounds of intervals in [0, 1].

        Columns: `checkpoint`, `suite`, `decoding`, `accuracy`, `low`, `high`. `luffy.load_results` has more.
        """
        import pandas as pd  # as above

        cells = read_accuracies(stage.directory for stage in self.record.stages.values())
        rows = [(each.checkpoint, each.suite, each.decoding, each.accuracy, *each.interval) for each in cells]
        return pd.DataFrame(rows, columns=["checkpoint", "suite", "decoding", "accuracy", "low", "high"])

    @property
    def report(self) -> Path | None:
        """The page of the whole run; None until there is one."""
        return next(iter(sorted(self.directory.glob("report.html"))), None)

    def samples(
        self, count: int = 10, *, stage: str | None = None, reward: tuple[float, float] = (-float("inf"), float("inf"))
    ) -> "list[ShownSample]":
        """`count` responses at most with a reward within `reward`, with prompts, references and grades.

        They are those of `stage`, by default of RL, the newest first, else of the last evaluation; no confidential one
        is among them. Raises DataError without samples.
        """
        from luffy.api.sample_view import samples_of  # loads pyarrow

        return samples_of(self.record, stage, reward, count)

    def model(
        self, stage: str | None = None, *, step: int | None = None
    ) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The policy of `stage` (`base`, `sft`, `rl`; by default the last that is finished) and its tokenizer.

        With `step`, those of a checkpoint. The model is on the CPU, in evaluation mode. Raises DataError where there is
        none. The folder itself is `run.record.stages[STAGE].directory / "model"`.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer  # loads for seconds

        stages = self.record.stages
        made = [name for name in providing("policy", self.record.kinds) if read_manifest(stages[name].directory)]
        name = stage or next(reversed(made), "")
        if name not in stages:
            what = "no stage has made a policy yet" if stage is None else f"{stage}: no such stage"
            raise DataError(f"{self.name}: {what}; there are {', '.join(stages) or 'none'}")
        with tempfile.TemporaryDirectory() as folder:
            place = stages[name].directory / _MODEL
            if step is not None or name not in made:
                place = Path(folder) / _MODEL
                export_stage(stages[name].directory, place, step)
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype="auto", use_safetensors=True, trust_remote_code=False
            )
            return model.eval(), AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)


def run(
    config: str | Path | ExperimentConfig | Mapping[str, Value],
    overrides: Mapping[str, Value] | None = None,
    /,
    *,
    workspace: str | Path | None = None,
    only: Sequence[str] = (),
    force: Sequence[str] = (),
    verify: bool = False,
    adopt: bool = False,
    quiet: bool = False,
    **fields: Value,
) -> Run:
    """Run an experiment to its report, as `luffy run` does, and return the run. Finished stages are reused.

    `config` is a file, the name of a shipped experiment, or an experiment's values. `overrides` and `fields` are fields
    that differ: `seed=1`, `rl={"steps": 50}`, `{"rl.steps": 50}`. The other arguments are options of the command;
    `quiet` shows no progress.

    Raises ConfigError and UserError with the lines that the command prints, LuffyError where a stage fails, and
    KeyboardInterrupt once an interrupted run has ended; then and after a failure the same call continues.
    """
    texts = [f"{name}={flow_yaml(value)}" for name, value in {**(overrides or {}), **fields}.items()]
    where = find_workspace(workspace)
    with tempfile.TemporaryDirectory() as folder:
        file = config if isinstance(config, str | Path) else Path(folder) / "experiment.yaml"
        if not isinstance(config, str | Path):
            given = config.model_dump(mode="json") if isinstance(config, ExperimentConfig) else config
            Path(file).write_text(dump_yaml(given), encoding="utf-8")
        load_experiment(file, texts)
        command = [sys.executable, "-m", "luffy", "run", str(file), *texts, "--workspace", str(where.root)]
        options = {f"--only={name}": True for name in only} | {f"--force={name}": True for name in force}
        options |= {"--verify": verify, "--adopt": adopt}
        command += [option for option, is_set in options.items() if is_set]
        pid = _run_to_end(command, quiet=quiet)
    return Run(next(record.directory for record in list_records(where) if record.pid == pid))


def load_runs(workspace: str | Path | None = None) -> list[Run]:
    """All runs of a workspace, which is found as by the command line when left out; the newest first."""
    return [Run(record.directory) for record in list_records(find_workspace(workspace))]


def read_accuracies(stages: Iterable[Path], names: Mapping[str, str] | None = None) -> list[Accuracy]:
    """The results in these stage directories, of a sweep those of each step; none in others.

    Also where another version has written more or less than this one would. `names`: what to call some checkpoints.
    """
    folders = [folder for stage in stages for folder in (stage, *sorted(stage.glob("step_*")))]
    files = (file for folder in folders if (file := folder / _RESULTS_FILE).is_file())
    found = [parse_json(file.read_text(encoding="utf-8")) for file in files]
    return [
        Accuracy(checkpoint, row["suite"], row["decoding"], row["accuracy"], tuple(row["interval"]))
        for results in found
        for checkpoint in [(names or {}).get(results["checkpoint"], results["checkpoint"])]
        for row in results["rows"]
    ]


def export_stage(stage: Path, folder: Path, step: int | None) -> str:
    """Write the policy of the stage in the directory `stage` to `folder`; returns what it was.

    Without `step` this is its final model, or the newest checkpoint of an unfinished stage. Raises DataError when there
    is nothing to write.
    """
    if step is None and (stage / MANIFEST_FILE).is_file() and (stage / _MODEL).is_dir():
        copy_model_files(stage / _MODEL, folder, str(stage))
        return "the final model"
    job = read_job(stage / JOB_FILE)
    if not isinstance(job.settings, RLSettings | SFTSettings):
        raise DataError(f"{stage}: only checkpoints of sft and rl can be exported, this is {job.stage}")
    checkpoints = complete_checkpoints(stage)
    if not checkpoints:
        advice = "give an earlier stage, or a run that has finished (luffy show)"
        raise DataError(f"{stage}: {job.stage} has no policy yet; {advice}")
    if step is not None and step not in checkpoints:
        raise DataError(f"{stage}: no checkpoint of step {step}; there are: {', '.join(map(str, sorted(checkpoints)))}")
    chosen = max(checkpoints) if step is None else step
    from luffy.training.checkpoint import export_checkpoint  # torch: only when it is needed

    tokenizer, dtype = inputs_of(job, stage)["data"] / "tokenizer", job.settings.dtype
    export_checkpoint(checkpoints[chosen], stage=stage, tokenizer=tokenizer, dtype=dtype, folder=folder)
    return f"the checkpoint of step {chosen}"


def track_run(directory: Path, labels: Mapping[str, str]) -> None:
    """Show a whole run in the services of its configuration: accuracies, stages with their keys, settings, report.

    `labels` as in `TrackedRun`. Its stages, also those that were reused, are linked by their keys.
    """
    found = Run(directory)
    record, config = found.record, found.record.configuration
    if config is None or not config.tracking.services:
        return
    from luffy.tracking.services import ACCURACY, TrackedRun, open_services  # only where there is one

    cells = read_accuracies(stage.directory for stage in record.stages.values())
    metrics = {
        f"{ACCURACY}/{cell.checkpoint}/{cell.suite}/{cell.decoding}{part}": value
        for cell in cells
        for part, value in zip(("", "/low", "/high"), (cell.accuracy, *cell.interval), strict=True)
    }
    tracked = TrackedRun(
        key=f"{record.name}-{hashlib.sha256(f'{directory} {record.started}'.encode()).hexdigest()[:8]}",
        labels={**labels, "stage": "run"},
        out=directory,
        config=config.model_dump(mode="json"),
        report="" if found.report is None else found.report.resolve().as_uri(),
        stages={node: (stage.action, stage.key) for node, stage in record.stages.items()},
    )
    services = open_services(tracked, config.tracking)
    for service in services:
        service.call(lambda shown: shown.log(0, metrics))
    for service in services:
        service.close(failed=False)


def _run_to_end(command: Sequence[str], *, quiet: bool) -> int:
    """Run the command, showing what it prints; returns its process id, or raises what it ended with."""
    parent = os.getpid()
    is_terminal = sys.stdout.isatty() and sys.stdout is sys.__stdout__
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if is_terminal and not quiet else subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            start_new_session=True,  # the interrupt of a terminal, or of Jupyter, is passed on once, from here
            preexec_fn=lambda: die_with(parent),
        ) as process,
    ):
        is_interrupted, code = False, None
        while code is None:
            try:
                for line in process.stdout or ():
                    if not quiet:
                        sys.stdout.write(line)
                        sys.stdout.flush()
                code = process.wait()
            except KeyboardInterrupt:
                is_interrupted = True
                process.send_signal(signal.SIGINT)
        errors.seek(0)
        notes, is_error, message = f"\n{errors.read()}".rpartition("\nerror: ")
    if notes.strip() and not quiet:
        sys.stderr.write(f"{notes.strip()}\n")
    if is_interrupted:
        raise KeyboardInterrupt(message.strip())
    if code != EXIT_OK:
        words = message.strip() if is_error else f"the run ended with exit code {code}: {message.strip()[-_SHOWN:]}"
        raise (UserError if code == EXIT_USER_ERROR else LuffyError)(words)
    return process.pid
