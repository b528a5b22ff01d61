"""Two hosts over one workspace: a server on one, workers on both, and a host that dies in the middle of a stage.

Run as root: python tests/campaigns/two_hosts.py [--folder DIR]

The hosts are namespaces of this machine (tests/hosts.py): each has its own network address, host name, process numbers,
machine id and boot id, and both see one file system, whose locks reach both. In a second story `flock` is replaced by
one that always succeeds, as on a mount that keeps locks to each machine. A real network file system takes part in
neither. A line is printed for each observation; exit code 1 when one of them differs from what is promised. Some four
minutes on an idle machine.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "integration")]

from hosts import Host, two_hosts, why_not  # noqa: E402
from patience import PATIENCE_S, wait_until  # noqa: E402
from test_serve import LONG, Checkout  # noqa: E402

from luffy.config import load_experiment  # noqa: E402
from luffy.flows.api_client import ApiClient  # noqa: E402
from luffy.pipeline.chain.checkpoints import newest_checkpoint  # noqa: E402
from luffy.pipeline.chain.job import JOB_FILE, write_job  # noqa: E402
from luffy.pipeline.experiment import ExperimentRun, Unwatched, open_experiment  # noqa: E402
from luffy.pipeline.workspace import Workspace  # noqa: E402
from luffy.pipeline.workspace.records import RunRecord, list_records  # noqa: E402

PASSWORD = "lab:a-password-of-the-lab"
STAGE = "base"


class Lab:
    """The hosts' common checkout and workspace, and the server on `east`."""

    def __init__(self, folder: Path, east: Host, west: Host, stack: ExitStack) -> None:
        self.east, self.west, self.folder, self._stack = east, west, folder, stack
        self._checkout = Checkout(folder)
        self.workspace = Workspace(self._checkout.workspace)
        self._port = self._checkout.port
        self.url = f"http://{east.address}:{self._port}/api"
        self._environment = {
            **self._checkout.environment,
            "LUFFY_WORKSPACE": str(self.workspace.root),
            "PREFECT_API_AUTH_STRING": PASSWORD,
            "PREFECT_SERVER_API_AUTH_STRING": PASSWORD,
            "PREFECT_API_URL": self.url,
            "PYTHONUNBUFFERED": "1",
        }
        self._client = stack.enter_context(east.client())

    def start(self, host: Host, name: str, *arguments: str, **more: str) -> Callable[[], str]:
        """Start a Python program of the checkout on `host`; returns what reads its output."""
        log = self._stack.enter_context((self.folder / f"{name}.txt").open("ab"))
        host.start([sys.executable, *arguments], self._checkout.root, {**self._environment, **more}, log)
        return partial(self.read, name)

    def read(self, name: str) -> str:
        """What a program has printed."""
        return (self.folder / f"{name}.txt").read_text()

    def serve(self) -> None:
        """Start the server with a worker on `east`, and wait for it."""
        options = ["--host", self.east.address, "--port", str(self._port), "--workspace", str(self.workspace.root)]
        said = self.start(self.east, "serve", "flows/serve.py", *options, "--limit", "1")
        times = said().count("Ctrl-C ends")
        wait_until(lambda: said().count("Ctrl-C ends") > times or "error:" in said(), "the server")
        assert "error:" not in said(), said()

    def ask(self, method: str, path: str, body: Mapping[str, object] | None = None) -> dict[str, object]:
        """One request to the server."""

        def request() -> dict[str, object]:
            return ApiClient(self.url).ask(method, path, dict(body or {}) or None).raise_for_status().json()

        return self._client.submit(request).result(PATIENCE_S)

    def submit(self, overrides: Sequence[str]) -> str:
        """A run of the deployment full-pipeline/smoke; returns its identifier."""
        deployment = self.ask("GET", "deployments/name/full-pipeline/smoke")["id"]
        body = {"parameters": {"overrides": list(overrides)}}
        return str(self.ask("POST", f"deployments/{deployment}/create_flow_run", body)["id"])

    def state(self, run: str) -> str:
        return str(self.ask("GET", f"flow_runs/{run}")["state_type"])

    def tags(self, run: str) -> list[str]:
        return list(map(str, self.ask("GET", f"flow_runs/{run}")["tags"]))  # type: ignore[call-overload]

    def overrides(self, run: str) -> str:
        return str(self.ask("GET", f"flow_runs/{run}")["parameters"])

    def live(self) -> dict[str, RunRecord]:
        """The runs in progress, by host."""
        return {record.host: record for record in list_records(self.workspace) if record.recorded == "running"}

    def stage_of(self, host: Host) -> Path | None:
        """The directory of the stage on `host`, once it has a checkpoint."""
        record = self.live().get(host.name)
        entry = record.stages.get(STAGE) if record else None
        return entry.directory if entry and newest_checkpoint(entry.directory) else None


def events(stage: Path) -> list[dict[str, object]]:
    lines = (stage / "events.jsonl").read_text().splitlines() if (stage / "events.jsonl").exists() else []
    return [json.loads(line) for line in lines]


def texts(stage: Path, kind: str, host_pids: range) -> list[str]:
    """Texts of the events of that kind from processes with these numbers."""
    return [str(event["text"]) for event in events(stage) if event["kind"] == kind and event["pid"] in host_pids]


def work(stage: Path, host_pids: range) -> list[int]:
    """Where among the stage's events the work of processes with these numbers is."""
    kinds = ("started", "progress")
    return [at for at, event in enumerate(events(stage)) if event["kind"] in kinds and event["pid"] in host_pids]


def wait_for_work(stage: Path, host_pids: range, more: int = 1) -> None:
    """Return after that many further events."""
    before = len(work(stage, host_pids))
    wait_until(lambda: len(work(stage, host_pids)) >= before + more, "further steps")


def observe(what: str, is_so: bool = True) -> bool:
    print(f"{'ok ' if is_so else 'NOT'}  {what}", flush=True)
    return is_so


def spread(lab: Lab) -> tuple[dict[str, str], list[bool]]:
    """Two long runs, by the host that has taken each."""
    lab.serve()
    worker = ["worker", "start", "--pool", "luffy", "--type", "process", "--limit", "1"]
    lab.start(lab.west, "worker", "-m", "prefect", *worker)
    runs = [lab.submit([*LONG, f"seed={seed}"]) for seed in SEEDS]
    wait_until(lambda: lab.stage_of(lab.east) and lab.stage_of(lab.west), "a stage on each host")
    tagged = {run: [tag for tag in lab.tags(run) if tag.startswith("host:")] for run in runs}
    found = observe(f"two submitted runs are spread over both hosts and tagged: {sorted(tagged.values())}")
    return {tag.removeprefix("host:"): run for run, (tag,) in tagged.items()}, [found]


def waits(lab: Lab, stage: Path, seed: int) -> bool:
    """Start the run of the other host on this one, too."""
    same = ["flows/full_pipeline.py", "exp_configs/smoke.yaml", *LONG, f"seed={seed}"]
    said = lab.start(lab.east, "same", *same)
    wait_until(lambda: texts(stage, "waiting", EAST) or "error" in said(), "the lock")
    (holder,) = texts(stage, "waiting", EAST)
    return observe(f"the same run on the other host waits for {holder}", holder.endswith(" on west"))


def survives_garbage_collection(lab: Lab, stage: Path) -> bool:
    deleted = lab.start(lab.east, "gc", "-m", "luffy", "gc", "--delete", "--keep-runs", "0")
    wait_until(lambda: re.search(r"deleted|nothing|error", deleted()), "the deletion")
    wait_for_work(stage, WEST)
    return observe("after `luffy gc --delete --keep-runs 0` on one host the stage of the other goes on")


def survives_the_server(lab: Lab, stage: Path, runs: Mapping[str, str]) -> bool:
    lab.start(lab.east, "end", "-c", END_SERVER)
    wait_until(lambda: "ended\n" in lab.read("serve"), "the server's end")
    lab.serve()
    wait_for_work(stage, WEST)
    own, other = lab.state(runs["east"]), lab.state(runs["west"])
    text = f"the server is ended and started again: the run of its own worker is {own}, that of the other host {other}"
    return observe(text, (own, other) == ("CRASHED", "RUNNING"))


def goes_on_elsewhere(lab: Lab, stage: Path) -> list[bool]:
    """Kill the host in the middle of its stage."""
    step, _ = newest_checkpoint(stage) or (0, None)
    lab.west.kill()
    killed_at = time.monotonic()
    wait_until(lambda: work(stage, EAST), "the survivor's start")
    after_s = time.monotonic() - killed_at
    (resumed,) = texts(stage, "started", EAST)
    text = f"the other host is killed: the waiting run resumes its stage {resumed} after {after_s:.1f} s"
    found = [observe(text, int(resumed.split()[-1]) >= step)]
    wait_for_work(stage, EAST, more=3)
    is_alone = max(work(stage, WEST)) < min(work(stage, EAST))
    return [*found, observe("no step of one host was made while the other had the stage", is_alone)]


def over_shared_locks(lab: Lab) -> list[bool]:
    runs, found = spread(lab)
    stage = lab.stage_of(lab.west)
    assert stage is not None
    seed = next(seed for seed in SEEDS if f"seed={seed}" in lab.overrides(runs["west"]))
    found += [waits(lab, stage, seed), survives_garbage_collection(lab, stage)]
    return [*found, survives_the_server(lab, stage, runs), *goes_on_elsewhere(lab, stage)]


def over_locks_that_end_at_the_host(lab: Lab) -> list[bool]:
    """The program of one stage on both hosts: `flock` succeeds always, and the mount is taken for one that does so."""
    stage = prepared(lab)
    shim = built_shim(lab.folder)
    for host in (lab.west, lab.east):
        lab.start(host, f"{host.name}_stage", "-c", PROGRAM, str(stage), LD_PRELOAD=str(shim))
        wait_until(lambda: events(stage), "the first host")
    wait_until(lambda: texts(stage, "waiting", EAST), "the lease")
    (holder,) = texts(stage, "waiting", EAST)
    wait_for_work(stage, WEST, more=3)
    found = [observe(f"without locks between the hosts, the second waits for {holder}", " on west" in holder)]
    wait_until(lambda: newest_checkpoint(stage), "a checkpoint")
    return found + goes_on_elsewhere(lab, stage)


def prepared(lab: Lab) -> Path:
    """The directory of a long stage with its job, whose input is finished."""
    config = load_experiment(str(ROOT / "exp_configs" / "smoke.yaml"), LONG)
    experiment = open_experiment(config, lab.workspace)
    run = ExperimentRun(experiment, lab.workspace.new_run("local", {}))
    run.execute("prepare_data", Unwatched())
    plan = experiment.plan_node(STAGE)
    plan.directory.mkdir(parents=True)
    write_job(plan.directory / JOB_FILE, experiment.job(plan))
    return plan.directory


def built_shim(folder: Path) -> Path:
    """A library in which `flock` always succeeds, as seen from another host."""
    source = folder / "flock.c"
    source.write_text("int flock(int descriptor, int operation) { return 0; }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", source.with_suffix(".so"), source], check=True)
    return source.with_suffix(".so")


SEEDS = (3, 4)
EAST, WEST = range(20_000, 40_000), range(40_000, 60_000)
"""Process numbers of the hosts (tests/hosts.py)."""
END_SERVER = """
import psutil, signal
for process in psutil.process_iter(["cmdline"]):
    if "flows/serve.py" in (process.info["cmdline"] or ()):
        process.send_signal(signal.SIGINT)
"""
PROGRAM = """
import sys
from luffy.stages import base, program
program.is_of_one_machine = lambda folder: False
arguments = ["--config", sys.argv[1] + "/config.yaml", "--out", sys.argv[1]]
sys.exit(program.run_program("base", base.run, arguments, defers_stop_requests=True))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keep checkout, workspace and logs in this new folder")
    chosen = parser.parse_args().folder
    if (why := why_not()) is not None:
        print(f"error: {why}", file=sys.stderr)
        return 2
    os.environ["PREFECT_API_AUTH_STRING"] = PASSWORD
    with ExitStack() as stack:
        folder = chosen or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = []
        for story in (over_shared_locks, over_locks_that_end_at_the_host):
            with ExitStack() as of_story:
                where = folder / story.__name__
                where.mkdir(parents=True)
                east, west = of_story.enter_context(two_hosts(where))
                found += story(Lab(where, east, west, of_story))
        return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
