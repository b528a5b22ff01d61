"""Several runs in one table, and as Prometheus metrics, from their files."""

import json
import urllib.error
import urllib.request

import pytest
from patience import PATIENCE_S
from prometheus_client.parser import text_string_to_metric_families
from synthetic.finished_stages import begin

from luffy.cli.main import main
from luffy.cli.metrics_page import metrics_text, served_metrics
from luffy.cli.workspace_watch import WorkspaceWatch, is_over
from luffy.config import load_experiment
from luffy.errors import UserError
from luffy.flows.prefect_session import free_port
from luffy.pipeline.experiment import ExperimentRun, open_experiment
from luffy.pipeline.machine.events import EventWriter
from luffy.pipeline.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    return Workspace(tmp_path)


def started(workspace, name, step, **figures):
    """A run whose first stage is at `step` of 40."""
    config = load_experiment("exp_configs/smoke.yaml", [f"name={name}", f"seed={step}"])
    experiment = open_experiment(config, workspace)
    run = ExperimentRun(experiment, workspace.new_run(name, {"state": "running"}))
    plan = experiment.plan_node("prepare_data")
    begin(plan)
    run._enter(plan)
    events = EventWriter(plan.directory / "events.jsonl")
    events.started()
    events.progress(step, 40, **figures)
    (plan.directory / "metrics.jsonl").write_text(
        json.dumps({"step": step, "rollout/logp_gap_mean": 0.25, "val/accuracy": None}) + "\n"
    )
    return run


def samples(watch):
    families = text_string_to_metric_families(metrics_text(watch).decode())
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_each_run_has_a_row_with_its_step_and_figures(workspace):
    started(workspace, "one", 10, reward=0.5)
    started(workspace, "two", 20)
    rows = {status.run: status.cells for status in WorkspaceWatch(workspace).look()}
    assert rows["one-1"][:5] == ["one-1", "running", "prepare_data", "10/40", "0.500"]
    assert rows["two-1"][3:5] == ["20/40", "-"] and rows["two-1"][-1].endswith("ago")


def test_the_table_ends_when_all_runs_have_ended(workspace):
    one, two = started(workspace, "one", 10), started(workspace, "two", 20)
    watch = WorkspaceWatch(workspace)
    watch.look()
    one.close("finished")
    assert not is_over(watch.look())
    two.close("failed")
    assert is_over(watch.look())


@pytest.mark.parametrize(("states", "code"), [(("finished", "finished"), 0), (("finished", "failed"), 1)])
def test_watch_of_named_runs_tells_how_each_ended(workspace, capsys, states, code):
    for name, step, state in zip(("one", "two"), (10, 20), states, strict=True):
        started(workspace, name, step).close(state)
    assert main(["watch", "one", "two", "--workspace", str(workspace.root)]) == code
    out = capsys.readouterr().out
    assert "10/40" in out and f"one-1: {states[0]}" in out and f"two-1: {states[1]}" in out


def test_without_runs_there_is_a_line_and_names_exclude_all(workspace, capsys):
    assert main(["watch", "--all", "--workspace", str(workspace.root)]) == 2
    assert main(["watch", "--all", "one", "--workspace", str(workspace.root)]) == 2
    assert "leave out the names" in capsys.readouterr().err


def test_metrics_hold_state_step_figures_and_the_disk(workspace):
    started(workspace, "one", 10, reward=0.5)
    found = samples(WorkspaceWatch(workspace))
    assert found["luffy_run_state", "one-1", "running"] == 1 and found["luffy_run_state", "one-1", "failed"] == 0
    assert found["luffy_stage_step", "one-1", "prepare_data"] == 10
    assert found["luffy_stage_steps", "one-1", "prepare_data"] == 40
    assert found["luffy_stage_reward", "one-1", "prepare_data"] == 0.5
    assert found["luffy_stage_logp_gap", "one-1", "prepare_data"] == 0.25
    assert ("luffy_stage_accuracy", "one-1", "prepare_data") not in found
    assert found["luffy_stage_seconds_since_progress", "one-1", "prepare_data"] >= 0
    assert found[("luffy_workspace_free_bytes",)] > 0


def test_a_run_that_fails_between_scrapes_changes_its_state(workspace):
    run = started(workspace, "one", 10)
    watch = WorkspaceWatch(workspace)
    samples(watch)
    run.close("failed")
    found = samples(watch)
    assert found["luffy_run_state", "one-1", "running"] == 0 and found["luffy_run_state", "one-1", "failed"] == 1
    assert ("luffy_stage_seconds_since_progress", "one-1", "prepare_data") not in found


def test_a_killed_run_is_told_as_killed(workspace):
    started(workspace, "one", 10)
    file = workspace.runs / "one-1" / "run.json"
    watch = WorkspaceWatch(workspace)
    watch.look()
    file.write_text(json.dumps({**json.loads(file.read_text()), "process_start": "another-boot:1"}))
    assert samples(watch)["luffy_run_state", "one-1", "killed"] == 1


def test_metrics_are_served_to_this_machine_alone(workspace):
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with served_metrics(WorkspaceWatch(workspace), port):
        assert b"luffy_workspace_free_bytes" in urllib.request.urlopen(url, timeout=PATIENCE_S).read()
        foreign = urllib.request.Request(url, headers={"Host": "example.org"})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(foreign, timeout=PATIENCE_S)
        with pytest.raises(UserError, match="--metrics"), served_metrics(WorkspaceWatch(workspace), port):
            pass
