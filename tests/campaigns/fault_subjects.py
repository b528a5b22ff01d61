"""What `placed_kills.py` kills: stage programs, a run of the pipeline and commands, each with its reference."""

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fault_points import Fault, Shim
from killing import differences, processes_of, promised, promised_of

from luffy.config import STAGE_KINDS, load_experiment
from luffy.errors import LuffyError
from luffy.pipeline.events import EVENTS_FILE, EventReader
from luffy.pipeline.experiment import Experiment, Unwatched, open_experiment, start_run
from luffy.pipeline.garbage import partial_files
from luffy.pipeline.identity import read_identity
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.warm_start import LIBRARIES
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace
from luffy.processes import die_with, exit_without_finalizing
from luffy.stages.program import run_program
from luffy.tracking.metrics import METRICS_FILE

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "exp_configs" / "smoke.yaml")
_DEFERRING = ("base", "sft", "rl", "evaluate", "sweep", "difficulty", "sample", "synthesize")
_SWEPT = (2, 4)
_REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"
SAMPLED = (
    f"data.train={{{_REVERSING}, num_prompts: 24}}",
    f"data.corpus={{{_REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",  # reverses two digits now and then
    "sft.num_traces=null",
    "execution.rollout_batch_size=32",
)
_DIFFICULTY = "difficulty={num_samples: 8, max_response_tokens: 16, min_pass_rate: 0.05, max_pass_rate: 0.95}"
_SAMPLE = "sample={num_samples: 8, max_response_tokens: 16}"
_PLAIN = ("prepare_data", "base", "sft", "rl", "evaluate", "sweep", "report")
_FINISHED, _NOTHING = "finished", "nothing"
_ORPHAN_S = 20.0
_GRID = """\
name: small_grid
experiment: {smoke}
overrides: [chain=sft, "stages=[prepare_data, base, sft, evaluate]", evaluation.max_response_tokens=16]
grid: {{sft.num_traces: [4, 8]}}
seeds: [1]
"""
_COMPARISON = """\
name: small_comparison
experiment: {smoke}
overrides: [evaluation.max_response_tokens=16]
seeds: [1, 2]
reference: luffy
budget: {{optimizer_steps: 2}}
arms:
  luffy: {{chain: rl, method: luffy}}
  on_policy: {{chain: rl, method: on_policy}}
"""


class Subject(Protocol):
    """Something that can be killed and started again."""

    kind: str
    log: Path
    """What its runs have printed."""

    def reset(self) -> None:
        """Undo what it has made."""

    def run(self, shim: Shim, fault: Fault | None) -> int:
        """Run it with this fault; returns its exit code."""
        ...

    def state(self) -> str:
        """How far it is, in a word."""
        ...

    def problems(self) -> list[str]:
        """How its result differs from an undisturbed one."""
        ...

    def has_repeated(self, found: str) -> bool:
        """Whether the last run did again what had been finished, by the `state` that it found."""
        ...

    def end_orphans(self) -> int:
        """Wait for processes that the killed run has left, and end them; returns the number of those that stayed."""
        ...


def fork(work: Callable[[], int], shim: Shim, fault: Fault | None, log: Path) -> int:
    """Run `work` in a process that leads a group, under the shim; returns its exit code, -9 when it was killed."""
    shim.arm(fault)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setsid()
        die_with(parent, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 1
        try:
            shim.watch()
            code = work()
        except BaseException:  # the top of this process
            traceback.print_exc()
        exit_without_finalizing(code)
    _, status = os.waitpid(child, 0)
    shim.disarm()
    return os.waitstatus_to_exitcode(status)


def end_orphans(root: Path) -> int:
    """Live processes of the workspace after some patience, which are killed."""
    deadline = time.monotonic() + _ORPHAN_S
    while (left := processes_of(root)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(Exception):  # it may end by itself in this moment
            process.kill()
    return len(left)


@dataclass
class StageSubject:
    """A stage program in its place in a finished workspace."""

    kind: str
    directory: Path
    root: Path
    expected: dict[str, object]
    log: Path
    events: EventReader = field(init=False)

    def __post_init__(self) -> None:
        self.job = (self.directory / JOB_FILE).read_bytes()

    def reset(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)  # another subject may have deleted it
        self.directory.mkdir(parents=True)
        (self.directory / JOB_FILE).write_bytes(self.job)

    def run(self, shim: Shim, fault: Fault | None) -> int:
        os.environ[WORKSPACE_VARIABLE] = str(self.root)
        self.events = EventReader(self.directory / EVENTS_FILE, from_end=True)
        return fork(lambda: run_stage(self.kind, self.directory), shim, fault, self.log)

    def state(self) -> str:
        if (self.directory / MANIFEST_FILE).exists():
            return _FINISHED
        newest = newest_checkpoint(self.directory)
        return f"step {newest[0]}" if newest else _NOTHING

    def problems(self) -> list[str]:
        manifest = read_manifest(self.directory)
        if manifest is None:
            return ["no manifest"]
        collected = {garbage.path for garbage in partial_files(self.directory)}
        left = [path for path in self.directory.rglob(".*") if path.name != ".lock" and path.is_file()]
        found = differences(promised_of(self.directory), self.expected)
        found += [f"left: {name}/" for name in manifest.scratch if (self.directory / name).exists()]
        return found + [f"left: {path.relative_to(self.directory)}" for path in left if path not in collected]

    def has_repeated(self, found: str) -> bool:
        started = [event.text for event in self.events.read() if event.kind == "started"]
        if found == _FINISHED:
            return bool(started)
        return found != _NOTHING and started != [f"from {found}"]

    def end_orphans(self) -> int:
        return end_orphans(self.root)


@dataclass
class DamagedSubject:
    """A finished stage of which an output is missing: it is cleared and made again from scratch."""

    kind: str
    stage: StageSubject

    def __post_init__(self) -> None:
        self.log, directory = self.stage.log, self.stage.directory
        self.finished = self.log.parent / f"finished_{self.kind}"
        shutil.rmtree(self.finished, ignore_errors=True)
        shutil.copytree(directory, self.finished, symlinks=True)

    def reset(self) -> None:
        shutil.rmtree(self.stage.directory, ignore_errors=True)
        shutil.copytree(self.finished, self.stage.directory, symlinks=True)
        (self.stage.directory / METRICS_FILE).unlink()

    def run(self, shim: Shim, fault: Fault | None) -> int:
        return self.stage.run(shim, fault)

    def state(self) -> str:
        manifest = read_manifest(self.stage.directory)
        is_damaged = manifest is not None and not manifest.is_intact(self.stage.directory)
        is_cleared = manifest is None and read_identity(self.stage.directory) is None
        return "damaged" if is_damaged else "half cleared" if is_cleared else self.stage.state()

    def problems(self) -> list[str]:
        return self.stage.problems()

    def has_repeated(self, found: str) -> bool:
        return found not in ("damaged", "half cleared") and self.stage.has_repeated(found)

    def end_orphans(self) -> int:
        return self.stage.end_orphans()


@dataclass
class RunSubject:
    """The pipeline without Prefect: a run whose report is missing, made by a process of its own."""

    kind: str
    experiment: Experiment
    log: Path
    arguments: Sequence[str] = ()
    """Of the command line; empty: the pipeline itself, without Prefect."""
    missing: Sequence[str] = ()
    """Kinds of stages that are to be made."""

    def __post_init__(self) -> None:
        self.root = self.experiment.workspace.root
        # Of the stages that are there now: later subjects make others, some with the names of these.
        made = [self.experiment.plan_node(node.name).directory for node in self.experiment.nodes]
        kept = [path for path in _finished(self.root) if path in made or path.parent.name not in self.missing]
        self.expected = {directory: promised_of(directory) for directory in kept}
        self.traces: dict[Path, int] = {}

    def reset(self) -> None:
        for stage in self.missing:
            shutil.rmtree(self.root / "stages" / stage, ignore_errors=True)
        shutil.rmtree(self.root / "runs", ignore_errors=True)

    def run(self, shim: Shim, fault: Fault | None) -> int:
        self.traces = _manifests(self.root)
        if not self.arguments:
            return fork(lambda: run_chain(self.experiment), shim, fault, self.log)
        return run_command(self.arguments, self.root, shim, fault, self.log)

    def state(self) -> str:
        return f"{len(_manifests(self.root))} stages"

    def problems(self) -> list[str]:
        finished = _finished(self.root)
        found = [f"{directory} is not finished" for directory in self.expected if directory not in finished]
        for directory, expected in self.expected.items():
            found += differences(promised_of(directory), expected) if directory in finished else []
        gc = [
            sys.executable,
            "-m",
            "luffy.cli.main",
            "gc",
            "--delete",
            "--keep-runs",
            "0",
            "--workspace",
            str(self.root),
        ]
        shutil.copytree(self.root / "runs", kept := self.log.parent / "runs", symlinks=True, dirs_exist_ok=True)
        _age(self.root / "runs")
        done = subprocess.run([*gc, "--only", "run", "--only", "part"], capture_output=True, text=True, check=False)
        left = [path.name for path in (self.root / "runs").iterdir()]
        shutil.rmtree(self.root / "runs")
        kept.rename(self.root / "runs")
        return found + ([f"gc left {left}: {done.stderr}"] if left else [])

    def has_repeated(self, found: str) -> bool:
        now = _manifests(self.root)
        return any(now.get(path) != inode for path, inode in self.traces.items())

    def end_orphans(self) -> int:
        return end_orphans(self.root)


@dataclass
class GcSubject:
    """`luffy gc --delete` over two runs that are given up, an unused result, a torn checkpoint and an empty run."""

    kind: str
    experiment: Experiment
    log: Path

    def __post_init__(self) -> None:
        self.root = self.experiment.workspace.root
        self.expected = promised(self.root)
        (self.run_folder,) = (self.root / "runs").iterdir()
        (self.unused,) = (self.root / "stages" / "report").iterdir()
        self.kept = self.log.parent / "kept_run"
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.run_folder, self.kept, symlinks=True)

    def reset(self) -> None:
        runs = self.root / "runs"
        shutil.rmtree(runs, ignore_errors=True)
        for name in (self.run_folder.name, "smoke-8", "smoke-9"):
            shutil.copytree(self.kept, runs / name, symlinks=True)
        old = self.unused.with_name("0" * len(self.unused.name))
        shutil.rmtree(old, ignore_errors=True)
        shutil.copytree(self.unused, old)
        (rl,) = (self.root / "stages" / "rl").iterdir()
        (rl / "checkpoints" / "step_000999" / "policy").mkdir(parents=True, exist_ok=True)
        (rl / "checkpoints" / "step_000999" / "policy" / "torn").write_bytes(bytes(99))
        (runs / "smoke-7").mkdir(exist_ok=True)  # killed before its record was written
        _age(runs / "smoke-7")
        os.utime(self.run_folder / "run.json")

    def run(self, shim: Shim, fault: Fault | None) -> int:
        arguments = ["gc", "--delete", "--keep-runs", "1", "--workspace", str(self.root)]
        return fork(lambda: luffy(arguments), shim, fault, self.log)

    def state(self) -> str:
        return f"{len(list((self.root / 'runs').iterdir()))} runs"

    def problems(self) -> list[str]:
        found = differences(promised(self.root), self.expected)
        left = [
            str(path) for path in self.root.rglob("*") if path.name.startswith(".trash") or path.name == "step_000999"
        ]
        runs = sorted(path.name for path in (self.root / "runs").iterdir())
        return found + left + ([f"runs are left: {runs}"] if runs != [self.run_folder.name] else [])

    def has_repeated(self, found: str) -> bool:
        return False

    def end_orphans(self) -> int:
        return end_orphans(self.root)


def prepare_subjects(roots: Path, kept: Path, kinds: Sequence[str], shim: Shim) -> Iterator[Subject]:
    """The subjects of these kinds, after what they need has been made in workspaces below `roots`."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in (*LIBRARIES, *(f"luffy.stages.{stage}" for stage in STAGE_KINDS)):
        importlib.import_module(name)  # once, and not in every fork
    log = kept / "log.txt"
    plain = _plain(roots / "plain", shim, log, kinds)
    for kind in [kind for kind in kinds if kind in _PLAIN]:
        yield subject_of(kind, plain, log)
    if "damaged" in kinds:
        yield DamagedSubject("damaged", subject_of("sft", plain, log))
    sampled = [kind for kind in kinds if kind in ("difficulty", "sample", "synthesize")]
    for kind in sampled:
        experiment = _sampled(kind, roots / "sampled", shim, log)
        os.environ[WORKSPACE_VARIABLE] = str(roots / "sampled")
        make_chain(experiment, shim, log, last=kind)
        yield subject_of(kind, experiment, log)
    yield from _commands(roots, kept, kinds, shim, plain)


def _commands(roots: Path, kept: Path, kinds: Sequence[str], shim: Shim, plain: Experiment) -> Iterator[Subject]:
    log, root = kept / "log.txt", str(roots / "plain")
    os.environ[WORKSPACE_VARIABLE] = root
    if "run" in kinds:
        yield RunSubject("run", plain, log, missing=("report",))
    if "luffy_run" in kinds:
        arguments = ["run", SMOKE, "execution.checkpoint.keep=9", "--workspace", root]
        yield RunSubject("luffy_run", plain, log, arguments, ("report",))
    for kind, text in (("grid", _GRID), ("compare", _COMPARISON)):
        if kind in kinds:
            file = kept / f"{kind}.yaml"
            file.write_text(text.format(smoke=SMOKE))
            arguments = [kind, str(file), "--workspace", root]
            run_command(arguments, Path(root), shim, None, log)  # so that its runs are finished
            yield RunSubject(kind, plain, log, arguments)
    if "gc" in kinds:
        lone = _plain(roots / "gc", shim, log)  # without the results of the grid and the comparison
        shutil.rmtree(roots / "gc" / "runs", ignore_errors=True)
        fork(lambda: run_chain(lone), shim, None, log)
        yield GcSubject("gc", lone, log)


def _plain(root: Path, shim: Shim, log: Path, kinds: Sequence[str] = ()) -> Experiment:
    """The smoke experiment, finished in a workspace of its own, or up to the last of `kinds`."""
    config = load_experiment(SMOKE, ["execution.checkpoint.keep=9"])
    experiment = open_experiment(config, Workspace(root), sweep_steps=_SWEPT)
    os.environ[WORKSPACE_VARIABLE] = str(root)
    order = [node.stage for node in experiment.nodes]
    needed = ["sft" if kind == "damaged" else kind for kind in kinds]
    last = max(needed, key=order.index, default=None) if set(needed) <= set(order) else None
    make_chain(experiment, shim, log, last=last)
    return experiment


def subject_of(kind: str, experiment: Experiment, log: Path) -> StageSubject:
    """The stage of this kind in a finished chain."""
    node = next(node for node in experiment.nodes if node.stage == kind)
    plan = experiment.plan_node(node.name)
    directory = plan.directory
    write_job(directory / JOB_FILE, experiment.job(plan))  # where servers listen may be new
    return StageSubject(kind, directory, experiment.workspace.root, promised_of(directory), log)


def _sampled(kind: str, root: Path, shim: Shim, log: Path) -> Experiment:
    stages = {
        "difficulty": ("chain=rl", "method=on_policy", "stages=[prepare_data, base, difficulty, rl]", _DIFFICULTY),
        "sample": ("chain=expert_iteration", "stages=[prepare_data, base, sample, sft]", _SAMPLE),
    }
    if kind in stages:
        return open_experiment(load_experiment(SMOKE, [*SAMPLED, *stages[kind]]), Workspace(root))
    base = _sampled("difficulty", root, shim, log)
    make_chain(base, shim, log, last="base")
    teacher = f"path: {base.plan_node('base').directory / 'model'}, max_response_tokens: 16, num_samples: 8"
    taught = f"synthesize={{prompts: all, teachers: {{base: {{{teacher}}}}}, stop_when_kept: false}}"
    changes = [*SAMPLED, "chain=sft", "stages=[prepare_data, base, synthesize, sft]", taught]
    return open_experiment(load_experiment(SMOKE, changes), Workspace(root))


def make_chain(experiment: Experiment, shim: Shim, log: Path, *, last: str | None = None) -> None:
    """Make the stages that are not finished, each in a fork of this process; none after the first of kind `last`."""
    for node in experiment.nodes:
        plan = experiment.plan_node(node.name)
        if plan.action != "reuse":
            plan.directory.mkdir(parents=True, exist_ok=True)
            write_job(plan.directory / JOB_FILE, experiment.job(plan))
            code = fork(lambda node=node, plan=plan: run_stage(node.stage, plan.directory), shim, None, log)
            if code:
                sys.exit(f"{node.name} failed with exit code {code}; see {log}")
        if node.stage == last:
            return


def run_stage(stage: str, directory: Path) -> int:
    """The stage program in this process."""
    module = importlib.import_module(f"luffy.stages.{stage}")
    arguments = ["--config", str(directory / JOB_FILE), "--out", str(directory)]
    return run_program(stage, module.run, arguments, defers_stop_requests=stage in _DEFERRING)


def run_chain(experiment: Experiment) -> int:
    """The run that `luffy run` makes, without Prefect; its errors are reported as the command line does."""
    try:
        with start_run(experiment) as run:
            for node in experiment.nodes:
                run.execute(node.name, Unwatched())
    except LuffyError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def luffy(arguments: Sequence[str]) -> int:
    """The command line in this process."""
    from luffy.cli.main import main

    return main(list(arguments))


def run_command(arguments: Sequence[str], root: Path, shim: Shim, fault: Fault | None, log: Path) -> int:
    """A command as a process of its own that leads a group."""
    shim.arm(fault)
    parent = os.getpid()

    def begin() -> None:
        os.setsid()
        die_with(parent, signal.SIGKILL)
        shim.watch()

    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with log.open("ab") as output:
        command = [sys.executable, "-m", "luffy.cli.main", *arguments]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**env, WORKSPACE_VARIABLE: str(root)},
            stdout=output,
            stderr=output,
            preexec_fn=begin,
        )
        code = process.wait()
    shim.disarm()
    return code


def _manifests(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in root.glob(f"stages/*/*/{MANIFEST_FILE}")}


def _finished(root: Path) -> list[Path]:
    return [path.parent for path in sorted(_manifests(root))]


def _age(folder: Path) -> None:
    """Make what lies there an hour old."""
    for path in [folder, *folder.rglob("*")]:
        hour_ago = time.time() - 3600.0
        os.utime(path, (hour_ago, hour_ago), follow_symlinks=False)
