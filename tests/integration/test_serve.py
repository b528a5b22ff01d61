"""`make serve` for real: server, worker and deployments; runs from another terminal, cancelled, killed, refused."""

import json
import os
import re
import signal
import sys

import psutil
import pytest
from flow_process import in_terminal
from serving import LONG, LOOK_S, ROOT, SHORT, Checkout
from support.patience import PATIENCE_S, ran, wait_until

from luffy.pipeline.lock import holder_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """With a server; a test that ends it starts another one."""
    checkout = Checkout(tmp_path_factory.mktemp("serve"))
    checkout.process = checkout.start()
    yield checkout
    checkout.process.send_signal(signal.SIGINT)
    assert checkout.process.wait(PATIENCE_S) == 0
    assert checkout.processes() == []
    assert not [*checkout.root.with_name("served").iterdir()]


@pytest.fixture(scope="module")
def first(served):
    """A run of SHORT by the printed commands, in a shell that knows nothing: the finished command, and the run."""
    words = ("    export PREFECT_API_URL", " full-pipeline/smoke ")
    export, command = (next(line.strip() for line in served.said if word in line) for word in words)
    script = f"{export}\nenv > environment\n{command} -p 'overrides={json.dumps(SHORT)}'\n"
    home = served.root.with_name("home")
    shell = ["env", "-i", "PATH=/usr/bin:/bin", f"HOME={home}", "sh", "-c", script]
    result = ran(shell, cwd=home)
    known = (home / "environment").read_text().splitlines()
    assert {"DO_NOT_TRACK=1", "PREFECT_SERVER_ANALYTICS_ENABLED=false"} <= {*known}
    return result, re.search(r"UUID: (\S+)", result.stdout)[1]


def test_a_deployment_runs_from_another_terminal_and_shows_what_it_does(served, first):
    result, run = first
    assert result.returncode == 0, result.stdout + result.stderr
    found = served.ask(f"flow_runs/{run}")
    assert found["name"].startswith("smoke stages=")  # without RL there is no method, and the list is no known chain
    assert "experiment:smoke" in found["tags"] and not any(tag.startswith("chain:") for tag in found["tags"])
    pages = {one["key"]: one["data"] for one in served.artifacts(run)}
    assert list(pages) == ["smoke-prepare-data", "smoke-base"], "a page a stage, in the chain's order"
    assert "data:image/svg+xml" in pages["smoke-base"]
    listed = {one["key"] for one in served.ask("artifacts/latest/filter", limit=200)}
    assert set(pages) <= listed
    assert any("corpus: 5" in log["message"] and log["level"] == 20 for log in served.logs(run))
    assert (served.workspace / "warm_server.log").is_file(), "its stages are forked, as by the command line"


def test_a_mistake_in_the_experiment_is_one_line_before_any_stage_and_not_retried(served):
    run = served.begin(["rl.stepz=3"])
    served.end_of(run)
    line, found = "rl.stepz: unknown key; did you mean 'steps'?", served.ask(f"flow_runs/{run}")
    assert (found["state_type"], found["run_count"]) == ("FAILED", 1)
    assert line in found["state"]["message"]
    assert served.task_states(run) == {}
    wait_until(lambda: not served.processes("prefect.engine"))  # it sends its last lines as it ends
    logs = [log["message"] for log in served.logs(run)]
    assert not any("Traceback" in message for message in logs)
    assert sum(line in message and "\n" not in message for message in logs) >= 1


def test_a_cancelled_run_ends_its_stage_and_the_next_one_resumes_it(served):
    run = served.begin(LONG)
    served.wait_for_steps()
    served.cancel(run)
    wait_until(lambda: not served.processes("luffy.stages"))
    served.wait_until_cancelled(run)
    run = served.begin(LONG)
    served.wait_for_steps()
    assert re.fullmatch(r"resume from step \d+", served.action_of_base())
    served.cancel(run)
    served.wait_until_cancelled(run)
    wait_until(lambda: not served.processes("prefect.engine"))  # the worker has seen its end


def test_a_retry_of_a_failed_run_resumes_the_stage_that_was_killed(served):
    """`prefect flow-run retry`, or the button in the UI."""
    run = served.begin([*SHORT, "base.steps=400", "execution.checkpoint.base_every=40"])
    served.wait_for_steps()
    glob = served.workspace.glob
    (stage,) = filter(holder_of, glob("stages/base/*"))
    psutil.Process(int(re.search(r"pid (\d+)", holder_of(stage))[1])).kill()
    assert served.end_of(run) == "FAILED"
    assert "base was ended by SIGKILL" in served.ask(f"flow_runs/{run}")["state"]["message"]
    # The worker would call the retried run crashed if it saw the end of the first try's process later.
    wait_until(lambda: not served.processes("prefect.engine"))
    result = served.run("-m", "prefect", "flow-run", "retry", run)
    assert result.returncode == 0, result.stdout + result.stderr
    served.end_of(run)
    found = served.ask(f"flow_runs/{run}")
    assert (found["state_type"], found["run_count"]) == ("COMPLETED", 2)
    assert re.fullmatch(r"resume from step \d+", served.action_of_base())
    assert served.task_states(run)["prepare_data"] == "Cached"


@pytest.fixture
def one_gpu(served, tmp_path, monkeypatch):
    """A driver that knows of one GPU, for this process and the flows that it starts; yields a way to start them."""
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '0, GPU-{tmp_path.name}-{served.port}, 81920'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    started, own = [], {"PATH": os.environ["PATH"], "LUFFY_WORKSPACE": str(served.workspace)}

    def start(*overrides, **more):
        command = [sys.executable, "flows/full_pipeline.py", "exp_configs/smoke.yaml", *overrides]
        started.append(in_terminal(command, cwd=served.root, env={**served.environment, **own, **more}))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_stages_share_no_gpu_and_a_cached_one_does_not_queue(served, first, one_gpu):
    """The one that has it is interrupted, which leaves it to the next. The cached one finds the server in the
    workspace."""

    def started():
        return set(served.workspace.glob("stages/base/*/events.jsonl"))

    def waiting():
        newest = served.ask("logs/filter", sort="TIMESTAMP_DESC", limit=200)
        return [one for one in newest if one["message"] == "waiting: 1 of 1 GPUs"]

    holder = one_gpu(*LONG)
    stages = served.workspace.glob
    wait_until(lambda: holder.poll() is not None or any(map(holder_of, stages("stages/base/*"))), every_s=LOOK_S)
    cached, _ = one_gpu(*SHORT, PREFECT_API_URL="").communicate(timeout=PATIENCE_S)
    assert "base: reused" in cached and "embedded server" not in cached
    newest = served.ask("flow_runs/filter", sort="START_TIME_DESC", limit=1)[0]
    assert (newest["deployment_id"], newest["state_type"]) == (None, "COMPLETED")
    shown = served.artifacts(newest["id"])
    assert (shown, served.task_states(newest["id"])) == ([], {"prepare_data": "Cached", "base": "Cached"})
    alone, _ = one_gpu("--only", "prepare_data").communicate(timeout=PATIENCE_S)
    assert re.search(r"^train +arithmetic +24 +24 +24 ", alone, re.MULTILINE), alone
    sharing, _ = one_gpu(*SHORT, "base.batch_size=6", "execution.gpus=0").communicate(timeout=PATIENCE_S)
    assert "base: finished" in sharing
    earlier = started()
    waiter = one_gpu(*SHORT, "base.batch_size=8")
    wait_until(waiting, every_s=LOOK_S)
    assert (started(), waiter.poll()) == (earlier, None)
    holder.send_signal(signal.SIGINT)
    said, _ = holder.communicate(timeout=PATIENCE_S)
    assert holder.returncode == 130, said
    assert "interrupted; the same command resumes" in said
    said, _ = waiter.communicate(timeout=PATIENCE_S)
    assert waiter.returncode == 0, said
    assert "waiting for 1 of 1 GPUs" in said
    assert len(started() - earlier) == 1


def test_kill_9_leaves_no_process_and_the_next_server_closes_what_ran(served):
    """The last test of this server. While it runs, another one at its port is refused in one line."""
    refused = served.run("flows/serve.py", "--port", str(served.port))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "a Prefect server answers there already" in refused.stderr
    run = served.begin(LONG)
    served.wait_for_steps()
    # One of the same pool that a worker on another host has said to be running.
    elsewhere = served.begin(SHORT, state={"type": "PENDING"}, tags=["host:another-host"])
    served.ask(f"flow_runs/{elsewhere}/set_state", state={"type": "RUNNING", "name": "Running"}, force=True)
    flow = served.ask("flows/filter", limit=1)[0]["id"]
    served.ask("deployments/", name="of an earlier version", flow_id=flow, entrypoint="luffy.flows.gone.gone")
    served.process.kill()
    served.process.wait()
    wait_until(lambda: served.processes() == [])
    served.process = served.start()
    assert (served.state(run), served.state(elsewhere)) == ("CRASHED", "RUNNING")
    assert "of an earlier version" not in {found["name"] for found in served.ask("deployments/filter", limit=200)}
    assert served.end_of(served.begin(SHORT)) == "COMPLETED"
    assert not [*served.workspace.glob("stages/" + "[0-9a-f]" * 32)]


def test_the_automations_of_deploy_are_those_of_this_version_of_prefect(served, tmp_path):
    """Applied as their file says, with a block of the server."""
    kinds = served.ask("block_types/filter", block_types={"name": {"like_": "Custom Webhook"}})
    (schema,) = served.ask("block_schemas/filter", block_schemas={"block_type_id": {"any_": [kinds[0]["id"]]}})
    block = served.ask(
        "block_documents/",
        name="lab", block_type_id=kinds[0]["id"], block_schema_id=schema["id"],
        data={"name": "lab", "url": "http://127.0.0.1:9/", "method": "POST"},
    )  # fmt: skip
    file = tmp_path / "automations.yaml"
    file.write_text((ROOT / "deploy" / "automations.yaml").read_text().replace(": BLOCK", f": {block['id']}"))
    done = served.run("-m", "prefect", "automation", "create", "--from-file", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    names = {found["name"] for found in served.ask("automations/filter", sort="NAME_ASC")}
    assert names == {"luffy: a run without a sign of life has crashed", "luffy: a run has failed or crashed"}
