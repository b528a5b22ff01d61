"""One run of an experiment: plans each stage, runs the stages that are needed, and records the run."""

import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from pydantic import ValidationError

from luffy.config import ExperimentConfig
from luffy.config.chain import StageNode
from luffy.config.execution import ExecutionConfig
from luffy.config.settings import BaseSettings, RLSettings, SFTSettings, StageSettings, has_own_vllm
from luffy.errors import EXIT_USER_ERROR, DataError, LuffyError, StageFailed, UserError
from luffy.pipeline.disk import usable
from luffy.pipeline.engine_process import EngineProcess, current_engine_process
from luffy.pipeline.events import EVENTS_FILE, Event, EventReader, how_it_ended
from luffy.pipeline.gpus import gpus_of_stage, own_gpus, trains_here
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import Identity, IdentityRecord, code_of, identity_of, read_identity
from luffy.pipeline.job import JOB_FILE, StageJob, write_job
from luffy.pipeline.lock import holder_of, stage_lock
from luffy.pipeline.manifest import Manifest, consumed_digests, finished_manifest, read_manifest, uncommitted_changes
from luffy.pipeline.memory import shared_context
from luffy.pipeline.outside import outside_files
from luffy.pipeline.plan import StagePlan, check_space, why_not_reused
from luffy.pipeline.records import RunRecord, read_run
from luffy.pipeline.reuse import FinishedStage, adopt, adoptable, complete_checkpoints, examine, newest_checkpoint
from luffy.pipeline.shared_cache import SharedCache
from luffy.pipeline.supervise import stage_command, supervise
from luffy.pipeline.workspace import JOBS_FOLDER, Workspace, claiming, link, write_run

RunState = Literal["running", "finished", "failed", "interrupted"]


class StageObserver:
    """Receives the events of a stage, for display: `finished` for one that was finished in an earlier run, too.

    This one shows nothing.
    """

    def planned(self, plan: StagePlan) -> None: ...
    def event(self, plan: StagePlan, event: Event) -> None: ...
    def line(self, plan: StagePlan, text: str) -> None: ...  # of the stage's log
    def finished(self, plan: StagePlan, manifest: Manifest) -> None: ...
    def failed(self, plan: StagePlan, error: BaseException) -> None: ...  # or was interrupted


@dataclass(frozen=True, slots=True)
class Experiment:
    """A configuration in a workspace: its stages and their identities."""

    config: ExperimentConfig
    workspace: Workspace
    nodes: tuple[StageNode, ...]
    identities: Mapping[str, Identity]
    verify: bool = False
    """Compare full hashes before a result is reused."""
    shared: SharedCache | None = None
    """Where stages that are not finished here are taken from, and finished ones copied to."""

    def plan(self, *, adopts: bool = False) -> tuple[StagePlan, ...]:
        """The decisions that a run would make now, with `adopts` one that takes over what other code has made; starts
        and writes nothing."""
        plans: list[StagePlan] = []
        adopted: dict[str, Path] = {}
        for node in self.nodes:
            pending = frozenset(plan.node.name for plan in plans if plan.action not in ("reuse", "adopt"))
            plan = self.plan_node(node.name, pending, adopted)
            may_adopt = adopts and plan.action == "run" and not pending.intersection(node.inputs.values())
            siblings = self.workspace.siblings(node.stage) if may_adopt else ()
            if found := adoptable(plan.directory, self._record(plan), siblings) if may_adopt else None:
                adopted[node.name], manifest = found
                plan = replace(plan, action="adopt", reason=f"{manifest.key}, made by other code")
            plans.append(plan)
        return tuple(plans)

    def chain_of(self, only: Collection[str], *, adopts: bool = False) -> tuple[StageNode, ...]:
        """The nodes to make or reuse for those in `only`, by default all, in the order of the chain.

        UserError where one is not finished that those in `only` are made from.
        """
        needed = {*only} or {node.name for node in self.nodes}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed |= {*node.inputs.values()}
        for plan in self.plan(adopts=adopts) if only else ():
            is_made = plan.action in ("reuse", "pull", "adopt")
            if plan.node.name in needed and plan.node.name not in only and not is_made:
                raise UserError(
                    f"--only: {plan.node.name}, which comes before, is not finished ({plan.headline}: {plan.reason}); "
                    f"add --only {plan.node.name}, or leave --only out"
                )
        return tuple(node for node in self.nodes if node.name in needed)

    def plan_node(
        self,
        name: str,
        pending: frozenset[str] = frozenset(),
        adopted: Mapping[str, Path] = MappingProxyType({}),
        *,
        pulls: bool = True,
    ) -> StagePlan:
        """The decision for one stage, while the stages in `pending` that it reads from have yet to be made, and those
        in `adopted` lie there; without `pulls` the shared cache is not asked."""
        node, identity, directory = self._node(name), self.identities[name], self._directory(name)
        inputs = {entry: adopted.get(source, self._directory(source)) for entry, source in node.inputs.items()}
        consumed = consumed_digests({entry: inputs[entry] for entry in inputs if node.inputs[entry] not in pending})
        condition = examine(directory, identity.key, consumed, verify=self.verify)
        decide = partial(StagePlan, node, identity, directory, inputs)
        awaited = sorted(set(node.inputs.values()) & pending)
        if condition.reusable:
            return decide("depends", f"waits for {', '.join(awaited)}") if awaited else decide("reuse")
        if pulls and self.shared is not None and not directory.exists():
            found = self.shared.find(node.stage, identity.key)
            if found is not None and all(found.consumed.get(entry) == digest for entry, digest in consumed.items()):
                return decide("pull", f"from {self.shared.url}")
        reason, holder = condition.reason, holder_of(directory)
        if not reason and read_identity(directory) is not None:
            ended = "begun" if holder else how_it_ended(EventReader(directory / EVENTS_FILE).read())
            reason = ended if newest_checkpoint(directory) else f"{ended} before its first checkpoint"
        elif not reason:
            siblings = self.workspace.siblings(node.stage)
            reason = why_not_reused(siblings, self.config.name, name, identity, node.inputs)
        if holder:
            reason = f"{reason}; {holder} is working on it"
        if condition.step:
            return decide("resume", reason, condition.step)
        if condition.reason or identity.series is None:
            return decide("run", reason)
        # The longest finished run of the same series that is shorter than this one.
        shorter = [
            (step, sibling)
            for sibling in self.workspace.siblings(node.stage)
            if (manifest := read_manifest(sibling)) is not None
            and manifest.series == identity.series
            and (step := max(complete_checkpoints(sibling), default=identity.length)) < identity.length
            and examine(sibling, manifest.key, consumed).reusable
        ]
        if not shorter:
            return decide("run", reason)
        step, extended = max(shorter)
        recorded = read_identity(extended)
        before = recorded.identity.length if recorded else "?"
        return decide("continue", f"{identity.stage}.steps {before} -> {identity.length}", step, extended)

    def _node(self, name: str) -> StageNode:
        return next(node for node in self.nodes if node.name == name)

    def _directory(self, name: str) -> Path:
        return self.workspace.stage_directory(self.identities[name].stage, self.identities[name].key)

    def adopt(self, name: str) -> str | None:
        """Take over a finished result that differs from the stage's in its code alone; its key, or None without one.

        The inputs have to be finished.
        """
        with claiming(self.workspace):  # a deletion takes neither the result nor its unfinished copy
            plan = self.plan_node(name)
            siblings = self.workspace.siblings(plan.identity.stage)
            return adopt(plan.directory, self.job(plan), self._record(plan), siblings)

    def pull(self, plan: StagePlan) -> Manifest | None:
        """Take a stage from the shared cache, as `claiming` the workspace; None where that failed."""
        return self.shared.pull(plan.directory, self.job(plan), self._record(plan)) if self.shared else None

    def _record(self, plan: StagePlan) -> IdentityRecord:
        consumed = consumed_digests(plan.inputs)
        return IdentityRecord(plan.identity.key, plan.node.name, plan.identity, consumed, self.config.name)

    def finished(self, name: str) -> FinishedStage:
        """The record of a finished stage. Raises LuffyError where it is not whole, or its inputs have changed."""
        node, identity, stages = self._node(name), self.identities[name], self.workspace.stages
        places = {entry: str(self._directory(source).relative_to(stages)) for entry, source in node.inputs.items()}
        digest = finished_manifest(self._directory(name)).digest
        try:
            return FinishedStage(stage=identity.stage, key=identity.key, inputs=places, digest=digest)
        except ValidationError as error:
            what = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise LuffyError(f"{name}: {what}; the same command makes it again") from None

    def labels(self, run: str) -> dict[str, str]:
        """How trackers tell the stages of the run of that name from others."""
        config = self.config
        method = config.method or config.chain
        found = {"experiment": config.name, "method": method, "seed": str(config.seed), "run": run}
        return {name: value for name, value in found.items() if value}

    def job(self, plan: StagePlan, *, afresh: bool = False, run: str = "") -> StageJob:
        return StageJob(
            node=plan.node.name,
            origin=plan.node.kind.origin,
            stage=plan.node.stage,
            experiment=self.config.name,
            labels=self.labels(run),
            key=plan.identity.key,
            settings=plan.node.settings,
            inputs={name: str(directory) for name, directory in plan.inputs.items()},
            upstream=plan.identity.upstream,
            code=plan.identity.code,
            files=plan.identity.files,
            extendable=plan.identity.extendable,
            extends=str(plan.extends) if plan.extends else None,
            verify=self.verify,
            afresh=afresh,
            execution=execution_of(plan.node.config, plan.node.settings),
            tracking=self.config.tracking,
        )


_WORTH_COMPILING = 200
"""Micro-batches from which a stage repays the compiler's minute: compiled, 24 layers launch 2,500 kernels fewer for
each, and the process needs about 0.1 ms to launch one."""


def execution_of(config: ExperimentConfig, settings: StageSettings) -> ExecutionConfig:
    """`config.execution` for one stage: with the context that a kept engine needs for the other stages, and with
    `compile: null` as false where the stage is too short to repay it.

    Responses count with half their limit. A stage of SFT whose length in steps is not known counts as long.
    """
    vllm = config.execution.vllm
    vllm = vllm.model_copy(update={"context_tokens": vllm.context_tokens or shared_context(config)})
    execution = config.execution.model_copy(update={"vllm": vllm})
    data, rows, steps = config.data, 0, 0
    longest = data.max_prompt_tokens + data.max_trace_tokens
    if isinstance(settings, RLSettings):
        rl = settings.rl
        steps, rows = rl.steps * rl.updates_per_step, rl.passes * rl.prompts_per_step * settings.objective.group.size
        rows, longest = rl.steps * rows, data.max_prompt_tokens + rl.max_response_tokens
    elif isinstance(settings, SFTSettings | BaseSettings):
        known = settings.sft if isinstance(settings, SFTSettings) else settings.base
        if known is None or known.steps is None:
            return execution
        steps, rows = known.steps, known.steps * known.batch_size
    num_micro_batches = max(steps, rows * longest // (2 * execution.micro_batch_tokens))
    if execution.compile is not None or num_micro_batches >= _WORTH_COMPILING:
        return execution
    return execution.model_copy(update={"compile": False})


def open_experiment(
    config: ExperimentConfig,
    workspace: Workspace,
    *,
    verify: bool = False,
    code: Callable[[str, Sequence[str]], Mapping[str, str]] = code_of,
    sweep_steps: tuple[int, ...] = (),
) -> Experiment:
    """The experiment with all keys computed; raises DataError if a file that it refers to is missing.

    With `sweep_steps`, the last stage evaluates the RL stage's checkpoints of these steps.
    """
    nodes = build_graph(config, sweep_steps)
    identities: dict[str, Identity] = {}
    for node in nodes:
        upstream = {name: identities[source].key for name, source in node.inputs.items()}
        files = outside_files(node.settings, node.kind.origin)
        made_by = code(node.stage, node.kind.rooms_of(node.settings))
        identities[node.name] = identity_of(node.stage, node.settings, upstream, made_by, files)
    url = config.execution.shared_cache
    return Experiment(config, workspace, nodes, identities, verify, None if url is None else SharedCache.open(url))


class ExperimentRun:
    """A started run, which records its stages in `run.json`. Several threads may make stages."""

    def __init__(
        self,
        experiment: Experiment,
        directory: Path,
        command: Callable[[str, Path, Path], list[str]] = stage_command,
        stopped: Callable[[], bool] = lambda: False,
        started: str = "",
    ) -> None:
        self.experiment = experiment
        self.directory = directory
        self._command = command
        self.stopped = stopped
        self._stages: dict[str, dict[str, str]] = {}
        self._spent_s: defaultdict[str, float] = defaultdict(float)
        self._recording = threading.Lock()
        self._started = started or _now()
        self._working_directory = str(Path.cwd())

    def execute(self, name: str, observer: StageObserver, *, afresh: bool = False) -> Manifest:
        """Make the stage `name`, or reuse it; returns its manifest.

        Raises WorkspaceError, and StageFailed: after a temporary failure another call resumes the stage. The time limit
        of a stage is that of all its calls together.
        `afresh` makes it again from the beginning, whatever is there.
        """
        with ExitStack() as claimed:
            claimed.enter_context(claiming(self.experiment.workspace))
            plan = self.experiment.plan_node(name)
            if afresh:
                plan = replace(plan, action="run", reason="asked for", step=0, extends=None)
            observer.planned(plan)
            try:
                with usable(plan.directory):
                    self.enter(plan)
                    if plan.action == "pull" and self.experiment.pull(plan) is None:
                        plan = self.experiment.plan_node(name, pulls=False)
                        plan = replace(plan, reason="; ".join(filter(None, ("could not be pulled", plan.reason))))
                        self.enter(plan)
                    claimed.close()
                    if plan.action not in ("reuse", "pull"):
                        self._start(plan, observer, afresh)
                    manifest = finished_manifest(plan.directory)
                    shared = self.experiment.shared
                    if shared is not None and plan.action != "pull" and shared.push(plan.directory, manifest):
                        observer.event(plan, Event("message", time.time(), os.getpid(), text=f"copied to {shared.url}"))
                    for page in plan.node.kind.pages:
                        link(plan.directory / page, self.directory / page)
            except BaseException as error:  # also Ctrl-C: the display must stop showing the stage as running
                observer.failed(plan, error)
                raise
        observer.finished(plan, manifest)
        return manifest

    def enter(self, plan: StagePlan) -> None:
        link(plan.directory, self.directory / "stages" / plan.node.name)
        self._stages[plan.node.name] = {
            "key": plan.identity.key,
            "directory": str(plan.directory),
            "action": plan.headline,
            "reason": plan.reason,
        }
        self.record("running")

    def record(self, state: RunState) -> None:
        """Write the run's record: how it stands, or how it ended."""
        nodes = self.experiment.nodes
        with self._recording:
            record = {
                "experiment": self.experiment.config.name,
                "state": state,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "working_directory": self._working_directory,
                "started": self._started,
                "updated": _now(),
                "stages": {node.name: self._stages[node.name] for node in nodes if node.name in self._stages},
                "planned": [f"{each.stage}/{each.key}" for each in self.experiment.identities.values()],
                "config": self.experiment.config.model_dump(mode="json"),
            }
            write_run(self.directory, record)

    def _start(self, plan: StagePlan, observer: StageObserver, afresh: bool) -> None:
        node, stage, config = plan.node.name, plan.node.stage, plan.node.config
        execution = config.execution
        check_space(plan, execution.checkpoint)
        # One job for garbage collection, which keeps what an unfinished stage needs, and the run's own for the program:
        # another run of the stage, with other execution settings, may replace the former before the program reads it.
        job = self.experiment.job(plan, afresh=afresh, run=self.directory.name)
        job_file = self.directory / JOBS_FOLDER / f"{node}.yaml"
        for file in (job_file, plan.directory / JOB_FILE):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_job(file, job)

        def waiting(what: str) -> None:
            observer.event(plan, Event("waiting", time.time(), os.getpid(), text=what))

        wanted, limit_s = gpus_of_stage(config, stage), execution.time_limits_s.get(stage)
        try:
            fewer = trains_here(config, stage)
            with own_gpus(wanted, waiting, self.stopped, fewer=fewer) as environment:
                began = time.monotonic()
                try:
                    supervise(
                        self._command(stage, plan.directory, job_file),
                        plan.directory,
                        on_event=lambda event: observer.event(plan, event),
                        on_line=lambda text: observer.line(plan, text),
                        environment=environment,
                        time_limit_s=None if limit_s is None else max(limit_s - self._spent_s[node], 0.0),
                        grace_s=execution.grace_s,
                        stopped=self.stopped,
                        has_engine=has_own_vllm(config, stage),
                    )
                finally:
                    self._spent_s[node] += time.monotonic() - began
        except StageFailed as failure:
            if failure.exit_code == EXIT_USER_ERROR:
                raise
            raise StageFailed(f"{node} {failure}", failure.exit_code, temporary=failure.temporary) from None


@contextmanager
def start_run(
    experiment: Experiment,
    stopped: Callable[[], bool] = lambda: False,
    command: Callable[[str, Path, Path], list[str]] = stage_command,
) -> Iterator[ExperimentRun]:
    """Start a run in a new `runs/<experiment>-<n>/`, or go on with one that has ended early; record how it ended.

    `stopped` ends its stages as Ctrl-C would, for runs outside the main thread; `command` starts a stage's program.
    """
    experiment.workspace.prepare()
    with ExitStack() as stack:
        with usable(experiment.workspace.root), claiming(experiment.workspace):
            known, new_run = _unfinished_run(experiment), experiment.workspace.new_run
            if known is not None:
                try:
                    stack.enter_context(stage_lock(known.directory, _leave_alone))
                except BlockingIOError:  # the same command, started at the same moment, goes on with it
                    known = None
            directory = known.directory if known else new_run(experiment.config.name, {"state": "running"})
            if known is None:
                stack.enter_context(stage_lock(directory))
            run = ExperimentRun(experiment, directory, command, stopped, known.started if known else _now())
            run.record("running")
            for name, patch in uncommitted_changes(experiment.workspace.root).items():
                file = directory / f"uncommitted-{name}.patch"
                file.touch(mode=0o600)
                file.write_bytes(patch)
        if current_engine_process() is None:  # many runs at a time share one
            stack.enter_context(EngineProcess().use())
        try:
            yield run
        except BaseException as error:  # also Ctrl-C
            ended = isinstance(error, StageFailed) and error.is_interruption
            with contextlib.suppress(OSError):  # a full disk: `error` reports it, and the stale record shows a dead run
                run.record("interrupted" if ended or not isinstance(error, Exception) else "failed")
            raise
        with usable(directory):
            run.record("finished")


def _leave_alone(holder: str) -> None:
    raise BlockingIOError(holder)


def _unfinished_run(experiment: Experiment) -> RunRecord | None:
    """The newest run of the experiment with the same configuration, where it has ended early."""
    workspace, config = experiment.workspace, experiment.config
    wanted = config.model_dump(mode="json"), str(Path.cwd())
    for number in sorted(workspace.run_numbers(config.name), reverse=True):
        record = read_run(workspace.runs / f"{config.name}-{number}")
        if (record.config, record.working_directory) == wanted:
            return record if record.condition in ("killed", "interrupted", "failed") else None
    return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def check_checkpoints(config: ExperimentConfig, steps: tuple[int, ...], workspace: Workspace) -> None:
    """Raise DataError unless the RL run of `config` is finished and has kept `steps`, or all of them are evaluated."""
    if not steps:
        return
    plans = {plan.node.name: plan for plan in open_experiment(config, workspace, sweep_steps=steps).plan()}
    if plans["sweep"].action == "reuse":
        return
    rl = plans[plans["sweep"].node.inputs["model"]]
    if rl.action != "reuse":
        reason = f"{rl.headline}: {rl.reason}" if rl.reason else rl.headline
        raise DataError(
            f"--steps: the RL run of {config.name} is not finished in {workspace.root} ({reason}); make it first, "
            "by luffy run with the same experiment and overrides"
        )
    kept = complete_checkpoints(rl.directory)
    if missing := [step for step in steps if step not in kept]:
        raise DataError(
            f"--steps: {rl.directory} has no checkpoint of {', '.join(map(str, missing))}; there are: "
            f"{', '.join(map(str, sorted(kept)))} (execution.checkpoint sets how many a run keeps)"
        )
