"""What the Prefect UI costs a running stage: CPU of the flow process, and how long the stage has to wait for it.

Run: python tests/benchmarks/prefect_view.py [seconds]

A real server, and a real flow whose task shows a stage that logs, reports four events a second, and writes 55 metrics a
step and a sample now and then, as RL does; nothing is trained, so that the cost stands alone. Printed: CPU seconds of
the publisher's thread and of the whole process, in per cent of one core, and the longest call of the observer, which
is all that can hold up a stage's end.
"""

import atexit
import json
import os
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    from luffy.flows.prefect_api import ApiServer, set_environment

    home = tempfile.TemporaryDirectory()
    set_environment(Path(home.name), debug=False)
    server = ApiServer(Path(home.name))
    atexit.register(server.stop)  # after Prefect has sent its last logs: exit handlers run in reverse
    os.environ["PREFECT_API_URL"] = server.url  # before Prefect is imported
    server.wait()

from prefect import flow, task
from rich.console import Console

from luffy.config import load_experiment
from luffy.pipeline.events import Event
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.plan import StagePlan
from luffy.pipeline.workspace import Workspace
from luffy.tasks.session import PrefectObserver, Session, open_session

ROOT = Path(__file__).resolve().parents[2]
METRICS = [f"actor/metric_{index}" for index in range(50)]
METRICS += ["reward/mean", "batch/off_reward", "actor/loss", "rollout/response_length_mean", "perf/tokens_per_s"]
EVENTS_PER_S = 4


@task
def show_stage(session: Session, plan: StagePlan, seconds: float) -> tuple[float, float, float]:
    """Seconds of the process, of the wall, and of the longest call of the observer."""
    observer = PrefectObserver(session)
    observer.planned(plan)
    plan.directory.mkdir(parents=True, exist_ok=True)
    total, longest = int(seconds * EVENTS_PER_S), 0.0
    began, cpu_began, own = time.perf_counter(), time.process_time(), 0.0
    for step in range(1, total + 1):
        before = time.process_time()
        with (plan.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, **dict.fromkeys(METRICS, 0.123456789 * step)}) + "\n")
        own += time.process_time() - before
        called = time.perf_counter()
        metrics = {"loss": 0.1, "reward": 0.5, "tokens_per_s": 5000.0}
        observer.event(plan, Event("progress", time.time(), 1, step, total, metrics))
        observer.line(plan, f"2026-01-01 00:00:00,000 INFO luffy.stages.rl: step {step}")
        longest = max(longest, time.perf_counter() - called)
        time.sleep(max(0.0, began + step / EVENTS_PER_S - time.perf_counter()))
    return time.process_time() - cpu_began - own, time.perf_counter() - began, longest


@flow
def view(root: Path, seconds: float) -> None:
    """Show one stage and print what it cost."""
    config = load_experiment(ROOT / "exp_configs" / "smoke.yaml")
    workspace = Workspace(root)
    experiment = open_experiment(config, workspace, code=lambda rooms: {})
    node = next(node for node in experiment.nodes if node.name == "rl")
    identity = experiment.identities["rl"]
    directory = workspace.stage_directory("rl", identity.key)
    with open_session(config, workspace, verify=False) as session:
        plan = StagePlan(node, identity, directory, {}, "run", "", 0, None)
        cpu_s, wall_s, longest_s = show_stage(session, plan, seconds)
        cost = session.publisher.cost
        Console().print(
            f"{wall_s:.0f} s: flow process {100 * cpu_s / wall_s:.2f} % of a core, of it artifacts "
            f"{100 * cost.cpu_s / wall_s:.2f} % ({cost.written} written, {cost.failed} failed); "
            f"longest call of the observer {1000 * longest_s:.1f} ms"
        )


if __name__ == "__main__":
    view(Path(home.name) / "workspace", float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
