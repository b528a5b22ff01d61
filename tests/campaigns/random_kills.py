"""A hundred `kill -9` over a pipeline that learns: the flow, a stage or the Prefect server, at random moments.

Run: python tests/campaigns/random_kills.py --workspace workspace/kills [--kills 100] [--mean-s 35] [key=value ...]
Tiny: the same with --config exp_configs/smoke.yaml --kills 5 --mean-s 8

First an undisturbed run, the reference. Then chains: the same command over a new workspace, killed and started again
until it is done and compared with the reference; chain after chain until the kills are used up. Whatever was killed, no
process is left, no finished stage runs again, and in the end everything but times equals the undisturbed run. Overrides
that change no result, as `execution.checkpoint.base_every=30`, spread the kills over more stages; give them from the
start, since the report shows them. Every kill is printed and written to a CSV in the workspace (`random_kills.csv`
beside this file is one). About an hour and a half on two cores, in which the code must not be edited: the keys of
stages stand for it.
Exit code 1 when anything differed from what is promised.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Literal, get_args

import pandas as pd
import psutil

from luffy.pipeline.events import EVENTS_FILE
from luffy.pipeline.manifest import MANIFEST_FILE, finished_manifest
from luffy.pipeline.workspace import RUN_FILE, WORKSPACE_VARIABLE
from luffy.processes import die_with
from luffy.tracking.metrics import METRICS_FILE, without_times

ROOT = Path(__file__).resolve().parents[2]
CSV = "random_kills.csv"
COLUMNS = ["chain", "attempt", "victim", "at_s", "stage", "exit_code", "to_end_s", "equal", "problems"]
Victim = Literal["flow", "stage", "server"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
_WARM_SERVER = "luffy.pipeline.warm_start"
_API_SERVER = "luffy.flows.own_pages:create_app"
_POLL_S = 0.02
_END_S = 120.0
"""A flow that was killed has ended by then."""
_ORPHAN_S = 20.0
"""Whatever a killed process had started has ended by then: a stage ends in order, which may take its grace of 5 s."""
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The command that is started again and again, and the workspace that is all it keeps."""

    workspace: Path
    config: str
    overrides: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """What all its runs have printed."""
        return self.workspace / "printed.log"

    def start(self) -> subprocess.Popen[bytes]:
        """The flow as a process, with a Prefect server of its own; it dies with this one."""
        self.workspace.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "flows/full_pipeline.py", self.config, *self.overrides]
        env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        parent = os.getpid()
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*command, "--workspace", str(self.workspace)],
                cwd=ROOT,
                # In the environment, too, where every process that it starts is known by it.
                env={**env, WORKSPACE_VARIABLE: str(self.workspace), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=lambda: die_with(parent, signal.SIGKILL),
            )


@dataclass(slots=True)
class Kill:
    """One `kill -9`."""

    victim: Victim
    at_s: float
    """After the start of the run."""
    stage: str
    """What was being made then: a node of the chain; empty between two."""
    exit_code: int | None = None
    """How the flow ended; None: it went on, and was killed by the next one."""
    to_end_s: float | None = None
    """From the kill to the end of the flow."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the command."""

    exit_code: int | None
    """None: it had to be ended, for it did not end by itself."""
    seconds: float
    kills: tuple[Kill, ...]
    problems: tuple[str, ...]
    """What ought not to be: orphans, finished stages that ran again, a flow that hangs or fails undisturbed."""


def draws(generator: Random, mean_s: float) -> Iterator[tuple[float, Victim]]:
    """Seconds after the start or the kill before, and victims: rare events, exponential waits, equal shares."""
    while True:
        yield generator.expovariate(1.0 / mean_s), generator.choice(VICTIMS)


def disturb(pipeline: Pipeline, planned: Iterator[tuple[float, Victim]], patience_s: float = 3600.0) -> Attempt:
    """Run the command once, kill as `planned` while it runs, and see what it leaves behind.

    A kill falls at its moment, or as soon as its victim is there; one that the run does not live to see does not count.
    A run without a kill has `patience_s` to end, and so has one that goes on without its server, or resumes its stage.
    """
    workspace, finished = pipeline.workspace, _finished_stages(pipeline.workspace)
    said = pipeline.log.stat().st_size if pipeline.log.exists() else 0
    flow, began = pipeline.start(), time.monotonic()
    kills: list[Kill] = []
    for wait_s, victim in planned:
        is_served = all(kill.victim != "server" for kill in kills)
        kill = _kill(flow, wait_s, victim if is_served or victim != "server" else "flow", workspace, began)
        if kill is None:
            break
        kills.append(kill)
        if kill.victim == "flow":
            break
    doomed = bool(kills) and kills[-1].victim == "flow"
    patience_s, problems = _END_S if doomed else patience_s, []
    try:
        code = flow.wait(patience_s)
    except subprocess.TimeoutExpired:
        flow.kill()
        flow.wait()
        code, problems = None, [f"the flow had not ended after {patience_s:.0f} s"]
    seconds = time.monotonic() - began
    if kills:
        kills[-1].exit_code, kills[-1].to_end_s = code, round(seconds - kills[-1].at_s, 2)
    elif code:
        tail = pipeline.log.read_bytes()[said:].decode(errors="replace").splitlines()[-_TAIL_LINES:]
        problems.append("\n".join([f"exit code {code}, although nothing was killed:", *tail]))
    problems += end_orphans(workspace)
    after = _finished_stages(workspace)
    again = [directory for directory, trace in finished.items() if after.get(directory) != trace]
    problems += [f"{directory.relative_to(workspace)}, which was finished, ran again" for directory in again]
    return Attempt(code, round(seconds, 2), tuple(kills), tuple(problems))


def promised(workspace: Path) -> dict[str, object]:
    """What runs of one experiment have in common, however often they were killed: all their stages' results but times.

    Names are `<node>/<file>`; values are hashes where the file must be the same bit for bit, as weights must.
    """
    found: dict[str, object] = {}
    for path in sorted(workspace.glob(f"stages/*/*/{MANIFEST_FILE}")):
        found |= promised_of(path.parent)
    return found


def promised_of(directory: Path) -> dict[str, object]:
    """The same for the one finished stage in `directory`."""
    manifest = finished_manifest(directory)
    found: dict[str, object] = {
        f"{manifest.node}: key": manifest.key,
        f"{manifest.node}: metrics": without_times(manifest.metrics),
        f"{manifest.node}: damaged": manifest.damaged(directory, verify=True),
    }
    for output in manifest.outputs:
        path, content = directory / output.path, output.sha256
        if output.path == METRICS_FILE:
            content = [without_times(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        if output.path != "report.html":  # it shows times
            found[f"{manifest.node}/{output.path}"] = content
    return found


def differences(found: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    """A line for everything that is not as expected; empty when all is."""
    names = [name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name)]
    return [f"{name}: {_shortened(found.get(name))} instead of {_shortened(expected.get(name))}" for name in names]


def processes_of(workspace: Path) -> list[psutil.Process]:
    """Live ones whose environment or command line names the workspace."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(WORKSPACE_VARIABLE) == str(workspace) or str(workspace) in process.cmdline():
                found.append(process)
    return found


def end_orphans(workspace: Path) -> list[str]:
    """A line for each process of the workspace that lives after some patience, and is killed."""
    deadline = time.monotonic() + _ORPHAN_S
    while (left := processes_of(workspace)) and time.monotonic() < deadline:
        time.sleep(0.05)
    problems = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            problems.append(f"orphan {process.pid}: {' '.join(process.cmdline())}")
            process.kill()
    return problems


def _kill(flow: subprocess.Popen[bytes], wait_s: float, name: Victim, workspace: Path, began: float) -> Kill | None:
    """None when the flow has ended before."""
    with suppress(subprocess.TimeoutExpired):
        flow.wait(wait_s)
    while flow.poll() is None:
        with suppress(psutil.NoSuchProcess):
            if victim := _find(name, psutil.Process(flow.pid)):
                stage = _being_made(workspace, flow.pid)
                victim.kill()
                return Kill(name, round(time.monotonic() - began, 2), stage)
        time.sleep(_POLL_S)
    return None


def _find(victim: Victim, flow: psutil.Process) -> psutil.Process | None:
    if victim == "flow":
        return flow
    children = _live_children(flow)
    if victim == "server":
        return next((child for child in children if _API_SERVER in child.cmdline()), None)
    for child in children:
        command = child.cmdline()
        if any(word.startswith("luffy.stages.") for word in command):
            return child
        if _WARM_SERVER in command and (forked := _live_children(child)):
            return forked[0]
    return None


def _live_children(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if child.status() != psutil.STATUS_ZOMBIE]


def _being_made(workspace: Path, flow: int) -> str:
    """By the record of the run of the process `flow`."""
    for path in workspace.glob(f"runs/*/{RUN_FILE}"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.get("pid") == flow:
            stages = {name: Path(made["directory"], MANIFEST_FILE) for name, made in record["stages"].items()}
            return next((name for name in reversed(stages) if not stages[name].exists()), "")
    return ""


def _finished_stages(workspace: Path) -> dict[Path, tuple[int, int, int]]:
    """By directory: which manifest it is, and how often the stage has begun."""
    found = {}
    for manifest in workspace.glob(f"stages/*/*/{MANIFEST_FILE}"):
        stat, events = manifest.stat(), (manifest.parent / EVENTS_FILE).read_text(encoding="utf-8")
        found[manifest.parent] = (stat.st_ino, stat.st_mtime_ns, events.count('"kind": "started"'))
    return found


def _shortened(value: object) -> str:
    text = str(value)
    return text if len(text) <= 200 else f"{text[:100]} … {text[-100:]}"


def show(chain: int, attempt: Attempt, num_before: int) -> None:
    """Print the kills of an attempt, after `num_before` earlier ones, and what ought not to have been."""
    now = time.strftime("%H:%M:%S")
    for number, kill in enumerate(attempt.kills, num_before + 1):
        end = "went on" if kill.to_end_s is None else f"exit code {kill.exit_code} after {kill.to_end_s:.1f} s"
        where = kill.stage or "between stages"
        print(f"{now} kill {number} (chain {chain}): {kill.victim} after {kill.at_s:.1f} s in {where}: {end}")
    if attempt.exit_code == 0:
        print(f"{now} chain {chain} is done")
    for problem in attempt.problems:
        print(f"  PROBLEM {problem}")
    sys.stdout.flush()


def write_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """A row a kill."""
    table = pd.DataFrame(rows, range(1, len(rows) + 1), COLUMNS)
    table["exit_code"] = table["exit_code"].astype("Int64")  # integers, although some are missing
    table.to_csv(path, index_label="kill", lineterminator="\n")


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--workspace", type=Path, required=True, help="for all its workspaces, and its own record")
    parser.add_argument("--config", default="exp_configs/arithmetic.yaml")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mean-s", type=float, default=35.0, help="mean time to a kill")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = options.workspace.resolve()
    reference = Pipeline(folder / "reference", options.config, tuple(options.overrides))
    undisturbed = disturb(reference, iter(()))
    if undisturbed.exit_code != 0 or undisturbed.problems:
        sys.exit(f"the undisturbed run failed: {undisturbed}")
    print(f"reference: {undisturbed.seconds:.0f} s", flush=True)
    rows: list[dict[str, object]] = []
    number, num_equal, num_problems = 0, 0, 0
    while len(rows) < options.kills:
        number, own, attempts = number + 1, [], []
        pipeline = replace(reference, workspace=folder / f"chain-{number}")
        while not any(attempt.exit_code == 0 for attempt in attempts):
            generator = Random(f"{options.seed} {number} {len(attempts)}")
            planned = islice(draws(generator, options.mean_s), options.kills - len(rows + own))
            attempt = disturb(pipeline, planned)
            show(number, attempt, len(rows + own))
            attempts.append(attempt)
            where = {"chain": number, "attempt": len(attempts), "problems": "; ".join(attempt.problems)}
            own += [where | asdict(kill) for kill in attempt.kills]
            write_csv(folder / CSV, rows + own)
            if attempt.exit_code != 0 and not attempt.kills:
                sys.exit(f"chain {number} cannot be finished: {attempt.problems}")
        found = differences(promised(pipeline.workspace), promised(reference.workspace))
        for line in found:
            print(f"  DIFFERS {line}", flush=True)
        num_problems += sum(len(attempt.problems) for attempt in attempts) + len(found)
        num_equal += not found
        rows += [row | {"equal": "no" if found else "yes"} for row in own]
        write_csv(folder / CSV, rows)
        if not found:  # else it is kept, to be looked at
            shutil.rmtree(pipeline.workspace)
    print(f"{len(rows)} kills in {number} chains, {num_equal} equal to the reference; {num_problems} problems.")
    return 1 if num_problems else 0


if __name__ == "__main__":
    sys.exit(main())
