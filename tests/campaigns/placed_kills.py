"""`kill -9` at each kind of write: before and after every open, fsync, rename..., in every kind of stage.

Run: python tests/campaigns/placed_kills.py --workspace workspace/placed [--per-stage 24] [--csv placed_kills.csv]
Tiny: the same with --only sft --per-stage 4
One fault again: --fault "rl before rename 3"
A disk that is full from a call on, instead of kills: --full
In a fixed selection that a seed draws: --only sft --only evaluate --sample 6 --seed 1

A library that is loaded before all others (`fault_shim.c`, built with gcc at the start) counts the calls of a process
group that change files of the workspace, and kills the group at a chosen one: before it, after it, or when half of a
write is out. A dry pass counts the calls of a subject. Then faults are spread over them, and each is one trial: the
subject is killed there, started again, and compared with the undisturbed run. Exit code 1 when anything differed from
what is promised.

Stages are forked from this process, which has loaded their libraries, so that a trial takes seconds. `damaged` is a
finished stage that is made again from scratch; in `sample_taught` a model folder is the teacher; `evaluate_paid` and
`sample_paid` ask an endpoint, which counts its answers. `luffy_run`, `gc`, `grid` and `compare` are commands, and are
killed at writes of their own processes.

Not covered: the processes of a Ray cluster, `luffy serve`, and writes that the C library makes by itself.
"""

import argparse
import hashlib
import importlib
import json
import mmap
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pandas as pd
from random_kills import differences, end_orphans, promised, promised_of

from luffy.config import STAGE_KINDS, load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.data.parquet import read_prompts
from luffy.errors import EXIT_NO_SPACE, EXIT_OK, EXIT_USER_ERROR
from luffy.pipeline.events import EVENTS_FILE, EventReader
from luffy.pipeline.experiment import Experiment, StageObserver, open_experiment, start_run
from luffy.pipeline.garbage import Retention, dispose, partial_files, survey
from luffy.pipeline.identity import read_identity
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.reuse import newest_checkpoint
from luffy.pipeline.warm_start import LIBRARIES
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace
from luffy.processes import die_with, exit_without_finalizing
from luffy.stages.program import run_program
from luffy.tracking.metrics import METRICS_FILE

sys.path.append(str(Path(__file__).resolve().parents[1]))
from support.stages import ROOT, opened
from synthetic.endpoint import CHAT, Endpoint, Reply, by_seed, completion

SMOKE = str(ROOT / "exp_configs" / "smoke.yaml")
_SWEPT = (2, 4)
_KEPT = "execution.checkpoint.keep=9"
_REVERSING = "kind: arithmetic, num_operations: [1], operations: {reverse: 1}"
SAMPLED = (
    f"data.train={{{_REVERSING}, num_prompts: 24}}",
    f"data.corpus={{{_REVERSING}, num_prompts: 512, unique: false, stepwise_share: 0.0}}",
    "base.steps=150",  # reverses two digits now and then
    "sft.num_traces=null",
    "execution.rollout_batch_size=32",
)
_LIMITS = "num_samples: 8, max_response_tokens: 16"
_SAMPLING = {
    "difficulty": (
        *("method=on_policy", "stages=[prepare_data, base, difficulty, rl]"),
        f"difficulty={{{_LIMITS}, min_pass_rate: 0.05, max_pass_rate: 0.95}}",
    ),
    "sample": ("stages=[prepare_data, base, sample, sft]", f"sample={{{_LIMITS}}}"),
}
_FINISHED, _NOTHING = "finished", "nothing"
_AT_ONCE = 4
_JUDGE = "judge"
_GRID = """\
name: small_grid
experiment: {smoke}
overrides: ["stages=[prepare_data, base, sft, evaluate]", evaluation.max_response_tokens=16]
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
_STAGE_OF = {"damaged": "sft", "sample_taught": "sample", "evaluate_paid": "evaluate", "sample_paid": "sample"}
COMMANDS = ("luffy_run", "grid", "compare", "gc")
KINDS = (*STAGE_KINDS, "damaged", "sample_taught", *COMMANDS, "evaluate_paid", "sample_paid")

Call = Literal["open", "write", "fsync", "rename", "unlink", "mkdir", "link", "truncate"]
Moment = Literal["before", "after", "half", "full"]
CALLS: tuple[Call, ...] = get_args(Call)
MOMENTS: tuple[Moment, ...] = get_args(Moment)
_KILLS: tuple[Moment, ...] = ("before", "after")
_TAKES_SPACE: tuple[Call, ...] = ("open", "write", "mkdir", "link")
_CONTROL, _ROOT = "PLACED_KILLS_CONTROL", "PLACED_KILLS_ROOT"


@dataclass(frozen=True, slots=True)
class Fault:
    """SIGKILL to the process group before or after a call, or within a write; or a disk that is full from there on."""

    call: Call
    number: int
    """The how manieth of its kind, from 1."""
    moment: Moment


_NUMBERS = [(name, np.uint64) for name in ("group", "kind", "number", "moment", "fired")]
_BLOCK = np.dtype([*_NUMBERS, ("counts", np.uint64, len(CALLS))])
"""The control block, as in fault_shim.c."""


class Shim:
    """Runs programs under the shim; its control block is shared with all that carry it. `log` has what they print."""

    def __init__(self, control: Path, log: Path) -> None:
        self._block, self.log = np.memmap(control, _BLOCK, "r+", shape=1), log

    def run(self, work: Callable[[], int], root: Path, fault: Fault | None = None) -> int:
        """Do `work` in a process that leads a group, with its calls counted from 0; its exit code, -9 when killed."""
        self._block[:] = 0
        if fault is not None:
            self._block["number"], self._block["moment"] = fault.number, MOMENTS.index(fault.moment)
            self._block["kind"] = 1 + CALLS.index(fault.call)
        parent, child = os.getpid(), os.fork()
        if child == 0:
            code = 1
            try:
                os.setsid()
                die_with(parent, signal.SIGKILL)
                output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.environ[WORKSPACE_VARIABLE] = str(root)
                self._block["group"] = os.getpgrp()
                code = work()
            except BaseException:  # the top of this process
                traceback.print_exc()
            exit_without_finalizing(code)
        _, status = os.waitpid(child, 0)
        self._block["group"] = 0  # nobody is watched
        return os.waitstatus_to_exitcode(status)

    @property
    def has_fired(self) -> bool:
        return bool(self._block["fired"])

    def counts(self) -> dict[Call, int]:
        """Calls of the last program, by kind."""
        return dict(zip(CALLS, self._block["counts"][0].tolist(), strict=True))


def load_shim(folder: Path, root: Path, log: Path) -> Shim:
    """The shim for files below `root`; builds it in `folder` and starts this program again where it is not loaded."""
    control, library = folder / "control", folder / "fault_shim.so"
    if os.environ.get(_ROOT) != str(root):
        folder.mkdir(parents=True, exist_ok=True)
        control.write_bytes(bytes(mmap.PAGESIZE))
        source = Path(__file__).with_name("fault_shim.c")
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-Wall", "-o", library, source, "-ldl"], check=True)
        loaded = {"LD_PRELOAD": str(library), _CONTROL: str(control), _ROOT: str(root)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **loaded})
    return Shim(control, log)


def place_faults(counts: Mapping[Call, int], number: int, *, full: bool = False) -> list[Fault]:
    """About `number` faults: as many of each kind of call, evenly over a run; before, after and within in turn.

    `full`: the disk fills up at calls that take space, instead of kills.
    """
    waiting = {call: count for call, count in counts.items() if count and (call in _TAKES_SPACE or not full)}
    found: list[Fault] = []
    left = number
    # Kinds with few calls first: what they cannot take goes to the others.
    for index, (call, count) in enumerate(sorted(waiting.items(), key=lambda item: item[1])):
        share = max(1, left // (len(waiting) - index))
        moments: tuple[Moment, ...] = ("full",) if full else (*_KILLS, "half") if call == "write" else _KILLS
        chosen = min(share, count * len(moments))
        # A stride that is no multiple of the number of moments would favour one; the turn decides instead.
        for turn in range(chosen):
            place = 1 + (turn * count + count // 2) // chosen if count > 1 else 1
            # Each kind begins with another moment: else few faults would all be before their calls.
            found.append(Fault(call, min(place, count), moments[(turn + index) % len(moments)]))
        left -= chosen
    return list(dict.fromkeys(found))


@dataclass
class StageSubject:
    """A stage program in its place in a workspace, in which the stage and what it needs is made first."""

    kind: str
    experiment: Experiment
    shim: Shim
    endpoint: Endpoint | None = None
    """The one that it asks; no answer may be paid for twice, but for those that were under way at the kill."""

    def __post_init__(self) -> None:
        self.stage = _STAGE_OF.get(self.kind, self.kind)
        make_chain(self.experiment, self.shim, last=self.stage)
        plan = self.experiment.plan_node(next(node.name for node in self.experiment.nodes if node.stage == self.stage))
        self.directory, self.root = plan.directory, self.experiment.workspace.root
        write_job(self.directory / JOB_FILE, self.experiment.job(plan))  # where servers listen may be new
        self.expected = promised_of(self.directory)
        self.finished = self.shim.log.parent / f"finished_{self.kind}"
        shutil.rmtree(self.finished, ignore_errors=True)
        shutil.copytree(self.directory, self.finished, symlinks=True)

    def reset(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)  # another subject may have deleted it
        if self.kind == "damaged":  # an output is missing: the stage is cleared and made again from scratch
            shutil.copytree(self.finished, self.directory, symlinks=True)
            (self.directory / METRICS_FILE).unlink()
        else:
            self.directory.mkdir(parents=True)
            shutil.copy(self.finished / JOB_FILE, self.directory)
        if self.endpoint is not None:
            self.endpoint.asked.clear()

    def run(self, fault: Fault | None) -> int:
        self.events = EventReader(self.directory / EVENTS_FILE, from_end=True)
        return self.shim.run(lambda: run_stage(self.stage, self.directory), self.root, fault)

    def state(self) -> str:
        manifest, newest = read_manifest(self.directory), newest_checkpoint(self.directory)
        if self.kind == "damaged" and manifest is not None and manifest.damaged(self.directory):
            return "damaged"
        if self.kind == "damaged" and manifest is None and read_identity(self.directory) is None:
            return "half cleared"
        is_finished = (self.directory / MANIFEST_FILE).exists()
        state = _FINISHED if is_finished else f"step {newest[0]}" if newest else _NOTHING
        return state if self.endpoint is None else f"{state}, {len(self.endpoint.asked)} paid"

    def problems(self) -> list[str]:
        manifest = read_manifest(self.directory)
        if manifest is None:
            return ["no manifest"]
        collected = {garbage.path for garbage in partial_files(self.directory)}
        left = [path for path in self.directory.rglob(".*") if path.name != ".lock" and path.is_file()]
        found = differences(promised_of(self.directory), self.expected)
        found += [f"left: {name}/" for name in manifest.scratch if (self.directory / name).exists()]
        found += [f"left: {path.relative_to(self.directory)}" for path in left if path not in collected]
        asked = [body for _, body in self.endpoint.asked] if self.endpoint else []
        distinct = {json.dumps(body, sort_keys=True): body["model"] for body in asked}
        again = Counter(body["model"] for body in asked) - Counter(distinct.values())
        paid_again = [(model, number) for model, number in again.items() if number > _AT_ONCE]
        return found + [f"{model}: {number} answers were paid for again" for model, number in paid_again]

    def has_repeated(self, found: str) -> bool:
        started = [event.text for event in self.events.read() if event.kind == "started"]
        state = found.partition(",")[0]
        if state == _FINISHED:
            return bool(started)
        return state not in (_NOTHING, "damaged", "half cleared") and started != [f"from {state}"]


@dataclass
class RunSubject:
    """A command that makes a run, or several, as a process of its own."""

    kind: str
    experiment: Experiment
    shim: Shim
    arguments: Sequence[str]
    missing: Sequence[str] = ()
    """Kinds of stages that are to be made."""

    def __post_init__(self) -> None:
        self.root = self.experiment.workspace.root
        # Of the stages that are there now: later subjects make others, some with the names of these.
        made = [self.experiment.plan_node(node.name).directory for node in self.experiment.nodes]
        kept = [path for path in _finished(self.root) if path in made or path.parent.name not in self.missing]
        self.expected = {directory: promised_of(directory) for directory in kept}

    def reset(self) -> None:
        for stage in self.missing:
            shutil.rmtree(self.root / "stages" / stage, ignore_errors=True)
        shutil.rmtree(self.root / "runs", ignore_errors=True)

    def run(self, fault: Fault | None) -> int:
        self.traces = _manifests(self.root)
        return self.shim.run(command(*self.arguments), self.root, fault)

    def state(self) -> str:
        return f"{len(_manifests(self.root))} stages"

    def problems(self) -> list[str]:
        finished = _finished(self.root)
        found = [f"{directory} is not finished" for directory in self.expected if directory not in finished]
        for directory, expected in self.expected.items():
            found += differences(promised_of(directory), expected) if directory in finished else []
        _age(self.root / "runs")
        workspace, rule = self.experiment.workspace, Retention(keep_runs=0)
        dispose(workspace, rule, [item for item in survey(workspace, rule).garbage if item.path != item.stage])
        left = [path.name for path in (self.root / "runs").iterdir()]
        return found + ([f"gc left {left}"] if left else [])

    def has_repeated(self, found: str) -> bool:
        now = _manifests(self.root)
        return any(now.get(path) != inode for path, inode in self.traces.items())


@dataclass
class GcSubject:
    """`luffy gc --delete` over two runs that are given up, an unused result, a torn checkpoint and an empty run."""

    kind: str
    experiment: Experiment
    shim: Shim

    def __post_init__(self) -> None:
        self.root = self.experiment.workspace.root
        self.expected = promised(self.root)
        (self.run_folder,) = (self.root / "runs").iterdir()
        (self.unused,) = (self.root / "stages" / "report").iterdir()
        self.kept = self.shim.log.parent / "kept_run"
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

    def run(self, fault: Fault | None) -> int:
        return self.shim.run(command("gc", "--delete", "--keep-runs", "1"), self.root, fault)

    def state(self) -> str:
        return f"{len(list((self.root / 'runs').iterdir()))} runs"

    def problems(self) -> list[str]:
        found = differences(promised(self.root), self.expected)
        torn = [*self.root.rglob(".trash*"), *self.root.rglob("step_000999")]
        runs = sorted(path.name for path in (self.root / "runs").iterdir())
        return found + list(map(str, torn)) + ([f"runs are left: {runs}"] if runs != [self.run_folder.name] else [])

    def has_repeated(self, found: str) -> bool:
        return False


Subject = StageSubject | RunSubject | GcSubject
"""Something that can be killed and started again.

`reset` undoes what it has made; `run` runs it with a fault and returns its exit code; `state` says how far it is, in a
word; `problems`, how its result differs from an undisturbed one; `has_repeated`, whether the last run did again what
had been finished, by the `state` that it found. `root` is its workspace.
"""


def prepare_subjects(roots: Path, kinds: Sequence[str], shim: Shim) -> Iterator[Subject]:
    """The subjects of these kinds, after what they need has been made in workspaces below `roots`."""
    for name in (*LIBRARIES, *(f"luffy.stages.{stage}" for stage in STAGE_KINDS)):
        importlib.import_module(name)  # once, and not in every fork
    plain = _plain(roots / "plain")
    for kind in kinds:
        if kind == "gc":
            yield _collecting(roots / "gc", shim)  # without the results of the grid and the comparison
        elif kind in ("luffy_run", "grid", "compare"):
            yield _of_command(kind, plain, shim)
        elif kind.endswith("_paid"):
            yield (_evaluated if kind == "evaluate_paid" else _taught)(roots / "paying", shim)
        elif kind in ("difficulty", "sample", "sample_taught"):
            yield _sampled(kind, roots / "sampled", shim)
        elif _STAGE_OF.get(kind, kind) in [node.stage for node in plain.nodes]:
            yield StageSubject(kind, plain, shim)
        else:
            sys.exit(f"no subject for {kind}; add one to placed_kills.py")


def _plain(root: Path) -> Experiment:
    """The smoke experiment in a workspace of its own."""
    return open_experiment(load_experiment(SMOKE, [_KEPT]), Workspace(root), sweep_steps=_SWEPT)


def _collecting(root: Path, shim: Shim) -> GcSubject:
    experiment = _plain(root)
    make_chain(experiment, shim)
    shutil.rmtree(root / "runs", ignore_errors=True)
    shim.run(lambda: run_chain(experiment), root)
    return GcSubject("gc", experiment, shim)


def _of_command(kind: str, plain: Experiment, shim: Shim) -> RunSubject:
    make_chain(plain, shim)
    if kind == "luffy_run":
        return RunSubject(kind, plain, shim, ["run", SMOKE, _KEPT], ("report",))
    file = shim.log.with_name(f"{kind}.yaml")
    file.write_text({"grid": _GRID, "compare": _COMPARISON}[kind].format(smoke=SMOKE))
    shim.run(command("compare", str(file)), plain.workspace.root)  # so that its runs are finished
    return RunSubject(kind, plain, shim, ["compare", str(file)])


def _sampled(kind: str, root: Path, shim: Shim) -> StageSubject:
    changes = _SAMPLING.get(kind, ())
    if kind == "sample_taught":
        base = opened(root, "smoke.yaml", *SAMPLED, *_SAMPLING["sample"])
        make_chain(base, shim, last="base")
        teacher = f"path: {base.plan_node('base').directory / 'model'}, max_response_tokens: 16, num_samples: 8"
        taught = f"sample={{prompts: all, teachers: {{base: {{{teacher}}}}}, stop_when_kept: false}}"
        changes = ("stages=[prepare_data, base, sample, sft]", taught)
    return StageSubject(kind, opened(root, "smoke.yaml", *SAMPLED, *changes), shim)


def make_chain(experiment: Experiment, shim: Shim, *, last: str | None = None) -> None:
    """Make the stages that are not finished, each in a fork of this process; none after the first of kind `last`."""
    for node in experiment.nodes:
        plan = experiment.plan_node(node.name)
        if plan.action != "reuse":
            plan.directory.mkdir(parents=True, exist_ok=True)
            write_job(plan.directory / JOB_FILE, experiment.job(plan))
            root = experiment.workspace.root
            code = shim.run(lambda node=node, plan=plan: run_stage(node.stage, plan.directory), root)
            if code:
                sys.exit(f"{node.name} failed with exit code {code}; see {shim.log}")
        if node.stage == last:
            return


def run_stage(stage: str, directory: Path) -> int:
    """The stage program in this process."""
    module = importlib.import_module(f"luffy.stages.{stage}")
    arguments = ["--config", str(directory / JOB_FILE), "--out", str(directory)]
    return run_program(stage, module.run, arguments, defers_stop_requests=stage not in ("prepare_data", "report"))


def run_chain(experiment: Experiment) -> int:
    """The run that `luffy run` makes, with a sweep and without Prefect."""
    with start_run(experiment) as run:
        for node in experiment.nodes:
            run.execute(node.name, StageObserver())
    return 0


def command(*arguments: str) -> Callable[[], int]:
    """Work that turns its process into this command."""

    def become() -> int:
        os.chdir(ROOT)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        os.execve(sys.executable, [sys.executable, "-m", "luffy.cli.main", *arguments], environment)

    return become


def _manifests(root: Path) -> dict[Path, int]:
    return {path: path.stat().st_ino for path in root.glob(f"stages/*/*/{MANIFEST_FILE}")}


def _finished(root: Path) -> list[Path]:
    return [path.parent for path in sorted(_manifests(root))]


def _age(folder: Path) -> None:
    """Make what lies there an hour old."""
    for path in [folder, *folder.rglob("*")]:
        hour_ago = time.time() - 3600.0
        os.utime(path, (hour_ago, hour_ago), follow_symlinks=False)


def _evaluated(root: Path, shim: Shim) -> StageSubject:
    endpoint = Endpoint(_answer_or_verdict, (CHAT,))
    judge = f"kind: judge, url: '{endpoint.url}/v1', model: {_JUDGE}, parallel: {_AT_ONCE}"
    asking = f"execution.server={{concurrency: {_AT_ONCE}}}"
    own = load_experiment(SMOKE, [f"grading.kind={{{judge}}}", asking, "execution.grader_workers=1"])
    config = evaluated(own, EvaluatedModel("api:org/model", urls=(endpoint.url,)))
    return StageSubject("evaluate_paid", open_experiment(config, Workspace(root)), shim, endpoint)


def _answer_or_verdict(path: str, body: dict) -> Reply:
    if body["model"] != _JUDGE:
        return by_seed(path, body)
    is_right = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()[0] % 2
    return completion(f"VERDICT: {'CORRECT' if is_right else 'INCORRECT'}")


def _taught(root: Path, shim: Shim) -> StageSubject:
    truths: dict[str, str] = {}

    def answer(path: str, body: dict) -> Reply:
        truth = truths[body["messages"][-1]["content"]]
        # Every third question gets a wrong answer to its first sample, so that another one is asked for.
        said = "100" if int(truth) % 3 == 0 and body["seed"] % 2 else truth
        return completion(f"{said} \\boxed{{{said}}}", prompt_tokens=5)

    endpoint = Endpoint(answer, (CHAT,))
    teacher = "big: {endpoint: {name: org/big}, max_response_tokens: 40, num_samples: 2}"
    served = f"big: {{urls: ['{endpoint.url}'], concurrency: {_AT_ONCE}}}"
    sample = f"sample={{prompts: all, teachers: {{{teacher}}}}}"
    chain = ("stages=[prepare_data, base, sample, sft]", sample, f"execution.teachers={{{served}}}")
    experiment = opened(root, "smoke.yaml", *SAMPLED, *chain)
    make_chain(experiment, shim, last="prepare_data")
    data = experiment.plan_node("prepare_data").directory
    truths |= {prompt.messages[-1].content: prompt.ground_truth for prompt in read_prompts(data / "train.parquet")}
    return StageSubject("sample_paid", experiment, shim, endpoint)


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, and what came of it."""

    kind: str
    call: str
    number: int
    of: int
    """Calls of this kind in the undisturbed run."""
    moment: str
    found: str
    """What the kill left: the newest checkpoint, a finished stage, nothing."""
    exit_code: int
    """Of the same command again."""
    equal: bool
    repeated: bool
    """Whether finished work was done again."""
    orphans: int
    problems: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.equal and not (self.exit_code or self.repeated or self.orphans or self.problems)


def try_fault(subject: Subject, fault: Fault, of: int) -> Trial | None:
    """One trial; None where the run came to its end before the call."""
    began, log = time.monotonic(), subject.shim.log
    subject.reset()
    said = log.stat().st_size
    code = subject.run(fault)
    if not subject.shim.has_fired:
        return None
    unclear = full_disk_problems(code, log.read_bytes()[said:].decode()) if fault.moment == "full" else []
    orphans = end_orphans(subject.root)
    found = subject.state()
    code = subject.run(None)
    problems = unclear + subject.problems()
    ended = {"found": found, "exit_code": code, "equal": problems == unclear, "repeated": subject.has_repeated(found)}
    left = {"orphans": len(orphans + end_orphans(subject.root)), "problems": "; ".join(problems)[:500]}
    seconds = round(time.monotonic() - began, 1)
    return Trial(subject.kind, of=of, **asdict(fault), **ended, **left, seconds=seconds)


def full_disk_problems(code: int, said: str) -> list[str]:
    """What is wrong with how a program ended on a full disk: in one line and as a mistake of the user's is promised."""
    if code == EXIT_OK:
        return []  # what could not be written was not needed
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    found = [] if code in (EXIT_USER_ERROR, EXIT_NO_SPACE) else [f"exit code {code} on a full disk"]
    if len(lines) != 1 or not re.search("no space left", lines[0], re.I):
        found.append(f"said of the full disk: {lines or said.splitlines()[-1:]}")
    return found + (["a traceback"] if "Traceback" in said else [])


def count_calls(subject: Subject) -> dict[Call, int]:
    """The calls of an undisturbed run, which also has to equal the reference; its result is there afterwards."""
    subject.reset()
    code = subject.run(None)
    counts = subject.shim.counts()
    if code or (problems := subject.problems()):
        sys.exit(f"{subject.kind}: the undisturbed run failed: exit code {code}, {problems}")
    return counts


def read_fault(text: str) -> tuple[str, Fault]:
    """`rl before rename 3`: the words of a row of the CSV and of a line of the log."""
    match text.split():
        case [kind, moment, call, number] if kind in KINDS and moment in MOMENTS and call in CALLS:
            return kind, Fault(call, int(number), moment)
    raise argparse.ArgumentTypeError(f"{text!r} is not KIND MOMENT CALL NUMBER, as in 'rl before rename 3'")


def main() -> int:
    """Run the campaign, or what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, required=True, help="for the workspaces and the built library")
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument("--per-stage", type=int, default=24, metavar="N", help="faults of each subject")
    parser.add_argument("--fault", action="append", default=[], type=read_fault, metavar="F", help="only this one")
    parser.add_argument("--full", action="store_true", help="the disk fills up, instead of kills")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many of the faults, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, default=Path("placed_kills.csv"), help="an existing one is continued")
    options = parser.parse_args()
    chosen = options.only or [kind for kind in KINDS if not options.fault or kind in dict(options.fault)]
    kinds = [kind for kind in KINDS if kind in chosen]
    folder = options.workspace.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    (folder / "kept").mkdir(parents=True, exist_ok=True)
    shim = load_shim(folder / "shim", folder / "roots", folder / "kept" / "log.txt")
    rows = pd.read_csv(options.csv, keep_default_na=False).to_dict("records") if options.csv.exists() else []
    trials = [Trial(**row) for row in rows]
    done = {(trial.kind, trial.call, trial.number, trial.moment) for trial in trials}
    waiting = []
    for subject in prepare_subjects(folder / "roots", kinds, shim):
        counts = count_calls(subject)
        said = ", ".join(f"{number} {call}" for call, number in counts.items() if number)
        print(f"{subject.kind}: {said}", flush=True)
        own = [fault for kind, fault in options.fault if kind == subject.kind]
        faults = own if options.fault else place_faults(counts, options.per_stage, full=options.full)
        waiting += [(subject, fault, counts[fault.call]) for fault in faults]
    # In no order, so that a campaign that is cut short has covered all of them.
    random.Random(options.seed).shuffle(waiting)
    for subject, fault, of in waiting[: options.sample]:
        if (subject.kind, fault.call, fault.number, fault.moment) in done:
            continue
        if (trial := try_fault(subject, fault, of)) is not None:
            trials.append(trial)
            where = f"{trial.moment} {trial.call} {trial.number} of {trial.of}"
            bad = f"BAD {trial.problems} exit {trial.exit_code} repeated {trial.repeated}"
            verdict = "good" if trial.is_good else bad
            print(f"{time.strftime('%H:%M:%S')} {trial.kind}: {where}: {trial.found}: {verdict}", flush=True)
            pd.DataFrame(trials).to_csv(options.csv, index=False, lineterminator="\n")
            if not trial.is_good:
                count_calls(subject)  # what the other subjects need of this one is made again
    for kind in kinds:
        own = [trial for trial in trials if trial.kind == kind]
        print(f"{kind}: {len(own)} faults, {sum(not trial.is_good for trial in own)} bad")
    return 1 if not all(trial.is_good for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
