"""luffy's automations on a real Prefect server: kept, corrected, and firing; messages arrive at a small web server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S
from prefect_api import place_empty_database
from test_serve import Checkout
from webhook import make_block, messages_to

from luffy.errors import UserError
from luffy.flows.alerts import Alerts, keep_automations
from luffy.flows.api_client import ApiClient
from luffy.flows.prefect_session import ApiServer, free_port, set_environment

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SHORTEST_MINUTES = 10 / 60
"""Prefect watches for the absence of events for at least ten seconds."""
PAGE = 5
"""Rows that the server returns at once, instead of 200."""
RUNS = """
import sys
from pathlib import Path
from prefect import flow, task
from luffy.cli.progress import StageLine
from luffy.config import load_experiment
from luffy.tasks.alarm_watch import AlarmWatch
from luffy.tasks.stage_events import StageEvents
from luffy.tracking.metrics import MetricsWriter

steps = "execution.alarms={zero_reward_steps: 2, no_signal_steps: 3}"
config = load_experiment("exp_configs/smoke.yaml", [steps])

def alarming(folder):
    metrics = MetricsWriter(folder / "metrics.jsonl")
    watch = AlarmWatch(config, folder, free=lambda path: 1024)
    for step, reward in enumerate([0.5, 0.0, 0.0, 0.0], 1):
        silence = {"batch/zero_advantage_share": 1.0}
        metrics.write(step, {"reward/mean": reward, "rollout/logp_gap_mean": 0.5, **silence})
        yield from watch.look(folder, at_once=True)

@task
def stage(run, ends, alarms):
    events, line = StageEvents(run), StageLine("rl", step=3, total=8)
    events.progressed(run, line)
    if alarms:
        folder = Path(sys.argv[1]) / run
        folder.mkdir()
        for alarm in alarming(folder):
            events.alarmed(run, line, alarm)
    if ends:
        events.ended(run, line, "finished")

def runs(run, name, ends=True, error=None, alarms=False):
    @flow(name=name, flow_run_name=run)
    def work():
        stage(run, ends, alarms)
        if error:
            raise ValueError(error)
    work(return_state=True)

for number in range(4):
    runs(f"finished {number}", "full-pipeline")
runs("resumed", "full-pipeline", ends=False)
runs("resumed", "full-pipeline")
runs("foreign", "somebody-elses", error="not luffy's", alarms=True)
runs("alarmed", "full-pipeline", alarms=True)
runs("broken", "full-pipeline", error="rl.steps: too many")
runs("stalled", "run-grid", ends=False)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server with its services, and the environment of a flow that reports to it."""
    home = tmp_path_factory.mktemp("alerts") / "prefect"
    place_empty_database(home)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PREFECT")]:
            patch.delenv(name)
        patch.setattr(os, "environ", os.environ.copy())
        os.environ["PREFECT_SERVER_API_DEFAULT_LIMIT"] = str(PAGE)
        set_environment(home, debug=True)
        started = ApiServer(home, free_port())
        started.wait()
        environment = {**os.environ, "PREFECT_API_URL": started.url}
    yield started, environment
    started.stop()


@pytest.fixture
def api(server):
    """The API of the server, without any automation."""
    client = ApiClient(server[0].url)
    for automation in client.rows("automations"):
        client.ask("DELETE", f"automations/{automation['id']}").raise_for_status()
    return client


@pytest.fixture(scope="module")
def webhook(server):
    """A block named custom-webhook/test, and the messages that are sent to it."""
    with messages_to(ApiClient(server[0].url), "test") as received:
        yield received


def named(api):
    return {automation["name"]: automation for automation in api.rows("automations")}


def test_without_a_block_only_silent_runs_are_watched_and_nothing_is_made_twice(api):
    keep_automations(api, Alerts())
    first = api.rows("automations")
    keep_automations(api, Alerts())
    assert [automation["name"] for automation in first] == ["luffy: a run without a sign of life has crashed"]
    assert api.rows("automations") == first


def test_an_automation_follows_its_definition_and_keeps_the_users_choice(api, webhook):
    keep_automations(api, Alerts("custom-webhook/test", 60))
    before = named(api)
    assert len(before) == 7
    stalled = before["luffy: no progress for some time"]
    api.ask("PATCH", f"automations/{stalled['id']}", {"enabled": False}).raise_for_status()
    keep_automations(api, Alerts("custom-webhook/test", 90))
    after = named(api)
    now = after.pop("luffy: no progress for some time")
    assert (now["id"], now["enabled"], now["trigger"]["within"]) == (stalled["id"], False, 5400)
    assert after == {name: automation for name, automation in before.items() if name in after}
    keep_automations(api, Alerts())
    assert set(named(api)) == {"luffy: a run without a sign of life has crashed"}


def test_automations_of_others_are_left_alone_and_of_ones_own_one_is_left(api):
    """More of each than the server returns at once."""
    keep_automations(api, Alerts())
    (own,) = api.rows("automations")
    definition = {name: own[name] for name in ("trigger", "actions")}
    for number in range(PAGE + 1):
        for name in (own["name"], f"luffy: mine {number}"):
            api.ask("POST", "automations/", {"name": name, **definition}).raise_for_status()
    before = api.rows("automations")
    keep_automations(api, Alerts())
    after = api.rows("automations")
    assert (len(before), len(after)) == (2 * PAGE + 3, PAGE + 2)
    assert [one for one in after if one["name"] != own["name"]] == [one for one in before if one["name"] != own["name"]]


def test_a_block_that_cannot_notify_is_refused_before_anything_is_changed(api, webhook):
    make_block(api, "secret", "key", {"value": "a canary"})
    for block in ("slack-webhook/none", "secret/key"):
        with pytest.raises(
            UserError, match=f"--notify {block}: this server has no such .*custom-webhook/test"
        ) as caught:
            keep_automations(api, Alerts(block))
        assert "\n" not in str(caught.value)
    assert api.rows("automations") == []


def test_serving_with_a_block_that_is_not_there_ends_in_one_line_and_leaves_nothing(tmp_path):
    checkout = Checkout(tmp_path)
    place_empty_database(checkout.workspace / "prefect")
    where = ("--port", str(checkout.port), "--workspace", str(checkout.workspace))
    result = checkout.run("flows/serve.py", *where, "--notify", "slack-webhook/lab")
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "--notify slack-webhook/lab: this server has no such notification block (it has none)" in result.stderr
    assert checkout.processes() == []


def test_the_report_of_a_deployments_run_says_how_to_resume_it(api, webhook):
    keep_automations(api, Alerts("custom-webhook/test"))
    flow = api.ask("POST", "flows/", {"name": "run-study"}).raise_for_status().json()["id"]
    deployment = api.ask("POST", "deployments/", {"name": "study", "flow_id": flow}).raise_for_status().json()["id"]
    run = (
        api.ask("POST", f"deployments/{deployment}/create_flow_run", {"name": "night"}).raise_for_status().json()["id"]
    )
    state = {"type": "CRASHED", "name": "Crashed", "message": "the machine was restarted"}
    api.ask("POST", f"flow_runs/{run}/set_state", {"state": state, "force": True}).raise_for_status()
    message = webhook.get(timeout=PATIENCE_S)
    assert message["subject"] == "luffy: night crashed"
    assert message["body"].startswith("night: Crashed\nthe machine was restarted\nhttp://127.0.0.1:")
    assert message["body"].endswith(f"\nTo resume it: prefect flow-run retry {run}")


def test_runs_of_luffy_that_fail_stall_or_alarm_are_reported_once_and_no_others(server, api, webhook, tmp_path):
    keep_automations(api, Alerts("custom-webhook/test", SHORTEST_MINUTES))
    command = [sys.executable, "-c", RUNS, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=server[1], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    received = {}
    while len(received) < 6:
        message = webhook.get(timeout=PATIENCE_S)
        assert message["subject"] not in received
        received[message["subject"]] = message["body"]
    pages = f"{server[0].url.removesuffix('/api')}/runs/flow-run/"
    runs = {run["name"]: pages + run["id"] for run in api.rows("flow_runs")}
    alarmed, page = "alarmed: stage rl of alarmed:", runs["alarmed"]
    assert received == {
        "luffy: broken failed": "broken: Failed\n"
        "Flow run encountered an exception: ValueError: rl.steps: too many\n"
        f"{runs['broken']}\n"
        "To resume it: the command that started it",
        "luffy: stalled makes no progress": "stalled: stage rl of stalled has made no progress for 0.166667 minutes\n"
        f"last seen at step 3 of 8; the run is Completed\n{runs['stalled']}",
        "luffy: log-probability gap over its bound (alarmed)": f"{alarmed} rollout/logp_gap_mean is 0.5 at step 1, "
        f"above the bound of 0.01\n{page}",
        "luffy: the reward fell to 0 (alarmed)": f"{alarmed} reward/mean fell to 0 and has been 0 for 2 steps in a row"
        f"\n{page}",
        "luffy: RL has no learning signal (alarmed)": f"{alarmed} every advantage has been 0 for 3 steps in a row: "
        f"rewards teach the policy nothing\n{page}",
        "luffy: the disk is nearly full (alarmed)": f"{alarmed} the disk of {tmp_path / 'alarmed'} is nearly full: "
        f"1.0 KiB free\n{page}",
    }
    assert webhook.empty()
