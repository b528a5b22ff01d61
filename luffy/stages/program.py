"""The part that all stage programs share: arguments, lock, reuse, events, manifest, exit code.

A stage module ends with `main("rl", run)` and is started as

    python -m luffy.stages.rl --config DIR/config.yaml --out DIR

The same program runs under the pipeline, under a job scheduler or by hand. Exit codes: 0 success, 1 failure, 2 a
mistake of the user (one line on stderr), 75 a failure that a restart may fix (something was lost, or SIGTERM
ended the stage after a checkpoint), 130 interrupted.
"""

import argparse
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar, cast

from luffy.config import STAGE_KINDS, StageName
from luffy.config.execution import CUBLAS_WORKSPACE, ExecutionConfig, TrackingConfig
from luffy.config.settings import StageSettings
from luffy.config.stage_kinds import StageKind, importing_kinds
from luffy.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    LuffyError,
    NoSpaceError,
    UserError,
    WorkspaceError,
)
from luffy.library_loading import loaded
from luffy.pipeline.disk import READ_ONLY, lack_of_space
from luffy.pipeline.events import EVENTS_FILE, INTERRUPTED, EventReader, EventWriter, seconds_of_attempts
from luffy.pipeline.identity import IdentityRecord, code_of, read_identity, write_identity
from luffy.pipeline.job import StageJob, read_job
from luffy.pipeline.lock import stage_lock
from luffy.pipeline.manifest import (
    Manifest,
    collect_outputs,
    consumed_digests,
    delete_scratch,
    finished_manifest,
    hardware,
    package_versions,
    read_manifest,
    write_manifest,
)
from luffy.pipeline.outside import changed_files
from luffy.pipeline.reuse import afresh, clear, examine
from luffy.processes import (
    MARK_VARIABLE,
    die_with,
    end_processes,
    exit_without_finalizing,
    take_supervisor,
    watch_parent,
)
from luffy.stop_request import StoppedOnRequest, deferring_stop_requests, receive_stop_requests

logger = logging.getLogger(__name__)
_WAITING = ("luffy.http_client", "luffy.cluster.ray_session", "luffy.hosted.verifiers_process")
"""Modules whose warnings say that the stage waits long for something: the terminal shows them, too."""
_STARTING = ("luffy.rollout.kept_engine",)
"""Modules whose messages the terminal shows."""
_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Environment variables that limit torch, MKL and oneDNN to AVX2."""
leave: Callable[[int], NoReturn] = exit_without_finalizing
"""How `main` ends with its exit code; a process that goes on to another stage sets it (`luffy.stages.engine_host`)."""
Settings = TypeVar("Settings", bound=StageSettings)


@dataclass(frozen=True, slots=True)
class StageContext:
    """Arguments of a stage's `run` besides its settings."""

    out: Path
    """The stage's own directory; it exists and is locked."""
    inputs: Mapping[str, Path]
    """Directories of the finished upstream stages, by input name."""
    key: str
    node: str
    """Name in the chain (`evaluate_sft`)."""
    execution: ExecutionConfig
    tracking: TrackingConfig
    events: EventWriter
    extends: Path | None = None
    """A finished, shorter run of the same series, whose checkpoint may be continued."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """How services show it (`TrackedRun.labels`)."""


@dataclass(frozen=True, slots=True)
class StageResult:
    """Outputs and headline numbers of a stage's `run`."""

    outputs: tuple[str, ...]
    """Files and folders in the stage's directory; all files are hashed into the manifest."""
    metrics: dict[str, float]
    """Headline numbers."""
    resumed_from: int = 0
    """Step of the checkpoint that the stage resumed from."""
    scratch: tuple[str, ...] = ()
    """Folders to delete once the manifest is written: until then, a killed stage resumes from them."""


def main(
    stage: StageName | StageKind,
    run: Callable[[Settings, StageContext], StageResult],
    *,
    defers_stop_requests: bool = False,
) -> None:
    """Run the stage with the arguments of the command line, and exit with its code; `stage`: its kind, or name.

    A `run` that defers stop requests looks for them (`luffy.stop_request`); any other is interrupted by them.
    """
    loaded()
    name = stage if isinstance(stage, str) else stage.name
    leave(run_program(name, run, sys.argv[1:], defers_stop_requests=defers_stop_requests))


def run_program(
    stage: StageName,
    run: Callable[[Settings, StageContext], StageResult],
    arguments: Sequence[str],
    *,
    defers_stop_requests: bool = False,
) -> int:
    """Run the stage with these arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m luffy.stages.{stage}", description=f"The stage {stage}.")
    parser.add_argument("--config", type=Path, required=True, help="the stage's config.yaml")
    parser.add_argument("--out", type=Path, required=True, help="the stage's directory")
    options = parser.parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    receive_stop_requests()
    supervisor = take_supervisor()
    if supervisor is not None:
        die_with(supervisor)
        watch_parent(supervisor, orphaned=_orphaned)
    out: Path = options.out.resolve()
    try:
        with importing_kinds():
            job = read_job(options.config)
        if job.stage != stage:
            raise ConfigError(f"{options.config}: stage: is {job.stage!r}; run python -m luffy.stages.{job.stage}")
        _set_up_cpu(job.execution)
        out.mkdir(parents=True, exist_ok=True)
        events = EventWriter(out / EVENTS_FILE)
    except (UserError, OSError) as error:
        return _report(_as_user_error(error) or error)
    deferring: AbstractContextManager[None] = contextlib.nullcontext()
    if defers_stop_requests:
        deferring = deferring_stop_requests(job.execution.grace_s, partial(_give_up, events, supervisor))

    def waiting(holder: str) -> None:
        logger.info("waiting for %s", holder)
        events.tell("waiting", holder)

    # Every outcome becomes an event and an exit code, and no child process is left.
    try:
        with _telling_of_waits(events), stage_lock(out, waiting=waiting), deferring:
            _run_locked(job, run, out, events)
    except StoppedOnRequest as stopped:
        with contextlib.suppress(OSError):
            events.tell("stopped", f"was asked to end: {stopped}")
        logger.info("was asked to end: %s", stopped)
        return stopped.exit_code
    except KeyboardInterrupt:
        _record_failure(events, INTERRUPTED)
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - top level: every error is reported to the supervisor in one line
        known = _as_user_error(error)
        text = str(error) if isinstance(error, LuffyError) else f"{type(error).__name__}: {error}"
        _record_failure(events, str(known) if known else text.splitlines()[0])
        return _report(known or error)
    finally:
        _end_children(supervisor)
    return EXIT_OK


def _run_locked(
    job: StageJob, run: Callable[[Settings, StageContext], StageResult], out: Path, events: EventWriter
) -> None:
    inputs = {name: Path(directory) for name, directory in job.inputs.items()}
    consumed = consumed_digests(inputs)
    condition = afresh(out) if job.afresh else examine(out, job.key, consumed, verify=job.verify)
    if condition.reusable:
        delete_scratch(out, finished_manifest(out))
        events.tell("finished", "reused")
        return
    # Jobs that are written by hand name no code.
    now = code_of(job.stage, STAGE_KINDS[job.stage].rooms_of(job.settings)) if job.code else {}
    if edited := sorted({name for name, _ in now.items() ^ job.code.items()}):
        raise UserError(
            f"code edited since the run began ({', '.join(edited)}): the key of {job.node} does not identify what it "
            "would make now; the same command plans it again"
        )
    _check_outside_files(job)
    # Work that is cleared does not count towards the result.
    recorded = None if condition.from_scratch else read_identity(out)
    earlier_s = seconds_of_attempts(EventReader(out / EVENTS_FILE).read()) if recorded else 0.0
    shorter_run: Path | None = None
    extended = ""
    if condition.step:
        finished = read_manifest(out)  # there where only its export is made again
        extended = (recorded.extended if recorded else "") or (finished.extended or "" if finished else "")
    elif job.extends and (shorter := read_manifest(Path(job.extends))) is not None:  # else deleted since the plan
        shorter_run, extended = Path(job.extends), shorter.key
    started = datetime.now(UTC)
    clear(out, condition)
    # Recorded before any work: an attempt that is killed leaves no manifest.
    write_identity(out, IdentityRecord(job.key, job.node, job.identity, consumed, job.experiment, extended))
    events.started(f"from step {condition.step}" if condition.step else "", earlier_s=earlier_s)
    labels = {**job.labels, "stage": job.node}
    context = StageContext(out, inputs, job.key, job.node, job.execution, job.tracking, events, shorter_run, labels)
    # The job validated its settings with this stage's class, the one that `run` expects.
    result = run(cast(Settings, job.settings), context)
    try:
        _check_outside_files(job)
    except UserError as error:
        clear(out, afresh(out))
        raise UserError(f"{error}; it changed while the stage worked, so nothing of its result is kept") from None
    manifest = Manifest(
        stage=job.stage,
        node=job.node,
        key=job.key,
        series=job.identity.series,
        settings=job.identity.settings,
        upstream=job.upstream,
        consumed=consumed,
        outputs=collect_outputs(out, result.outputs),
        metrics={name: float(value) for name, value in result.metrics.items()},
        execution=job.execution,
        versions=package_versions(),
        hardware=hardware(),
        started=started.isoformat(timespec="seconds"),
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        earlier_s=earlier_s,
        resumed_from=result.resumed_from,
        extended=extended or None,
        scratch=result.scratch,
    )
    write_manifest(out, manifest)
    delete_scratch(out, manifest)
    events.tell("finished")


def _check_outside_files(job: StageJob) -> None:
    """Raise UserError where a file of the user's is no longer what the key was computed from."""
    if (job.code or job.origin) and (changed := changed_files(job.settings, job.files, job.origin)):
        raise UserError(
            f"changed since the run was planned: {', '.join(changed)}; the key of {job.node} does not identify what it "
            "would make now; the same command plans it again, or give the file its planned content"
        )


@contextlib.contextmanager
def _telling_of_waits(events: EventWriter) -> Iterator[None]:
    """Shows on the terminal of the run what the modules `_STARTING` log, and the warnings of `_WAITING`."""

    def tell(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING or record.name in _STARTING:
            with contextlib.suppress(OSError):  # a full disk, which is reported by the stage's own work
                events.message(record.getMessage())
        return True

    loggers = [logging.getLogger(name) for name in (*_WAITING, *_STARTING)]
    for each in loggers:
        each.addFilter(tell)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(tell)


def _orphaned() -> None:
    """Called when the supervisor is gone: end this process cleanly, then by force."""
    os.kill(os.getpid(), signal.SIGTERM)
    _end_children()
    os._exit(EXIT_INTERRUPTED)


def _end_children(supervisor: int | None = None) -> None:
    """End the processes that this stage started; the supervisor may carry the same mark and is spared."""
    if mark := os.environ.get(MARK_VARIABLE):
        end_processes(mark, spared=supervisor)


def _give_up(events: EventWriter, supervisor: int | None) -> None:
    """Called from any thread, after the grace period of a stop request: end all processes of this stage.

    The event comes after the others have ended: its disk may hang.
    """
    if mark := os.environ.get(MARK_VARIABLE):
        end_processes(mark, 0.0, spared=supervisor)
    _record_failure(events, INTERRUPTED)
    os._exit(EXIT_INTERRUPTED)


def _set_up_cpu(execution: ExecutionConfig) -> None:
    """Limit threads and instructions; UserError where the CPU lacks the instructions."""
    torch = sys.modules.get("torch")  # do not import torch for stages that do not need it
    if execution.cpu_instructions == "avx2":
        if " avx2 " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
            raise UserError("execution.cpu_instructions: this CPU has no AVX2; choose native")
        os.environ.update(_AVX2)  # read at the first operation, which no stage has run yet
        if torch is not None and torch.backends.cpu.get_cpu_capability() != "AVX2":
            raise UserError(
                "execution.cpu_instructions: torch has already chosen another instruction set, so something used it "
                "before this stage began; remove that, or choose native"
            )
    if execution.deterministic:
        os.environ.update(CUBLAS_WORKSPACE)  # before an earlier stage of this process uses a GPU
    if execution.num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(execution.num_threads)
        if torch is not None:
            torch.set_num_threads(execution.num_threads)


def _as_user_error(error: Exception) -> UserError | None:
    if isinstance(error, UserError):
        return error
    lack = lack_of_space(error)
    if lack is not None:
        where = (error.filename if isinstance(error, OSError) else None) or "workspace"
        kind = WorkspaceError if lack == READ_ONLY else NoSpaceError
        return kind(f"{where}: {lack}; fix that (luffy gc lists what to delete); the same command resumes the stage")
    return None


def _record_failure(events: EventWriter, text: str) -> None:
    with contextlib.suppress(OSError):  # on a full disk only the exit code is left
        events.tell("failed", text)


def _report(error: Exception) -> int:
    if isinstance(error, UserError):
        with contextlib.suppress(OSError):  # stderr may be a file on the full disk
            sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    logger.error("the stage failed", exc_info=error)
    return error.exit_code if isinstance(error, LuffyError) else EXIT_FAILURE
