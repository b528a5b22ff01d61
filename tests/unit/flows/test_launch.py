"""Flows fork their stages from a warm server; every deployment of `prefect.yaml` names one, and its parameters."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from support.refusals import refused

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.errors import ConfigError
from luffy.flows import launch as launching
from luffy.pipeline.warm_start import can_start_warm, current_warm_server
from luffy.pipeline.workspace import WORKSPACE_VARIABLE, Workspace


@pytest.mark.skipif(not can_start_warm(), reason="needs no GPU")
@pytest.mark.parametrize(  # to make one stage, two, none, and those of a flow of many runs
    ("actions", "is_warm"), [(["run", "reuse"], False), (["run", "resume"], True), (["reuse"] * 8, False), (None, True)]
)
def test_a_flow_with_several_stages_to_make_has_a_warm_server(actions, is_warm, tmp_path, monkeypatch):
    found = []
    monkeypatch.setenv(WORKSPACE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(launching, "set_environment", lambda home, debug: None)
    monkeypatch.setattr(launching, "prefect_api", lambda home: None)
    monkeypatch.setattr(launching, "call_flow", lambda flow, parameters, server: found.append(current_warm_server()))
    plans = None if actions is None else lambda: [SimpleNamespace(action=action) for action in actions]
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launching.launch("json:loads", {}, Workspace(tmp_path), plans, debug=False) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [server is not None for server in found] == [is_warm]


DEPLOYMENTS = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_can_be_run_as_it_is_and_its_fields_are_described_in_the_ui(deployment):
    name = deployment["entrypoint"].rpartition(".")[2]
    flow = import_object(deployment["entrypoint"])
    fields = parameter_schema(flow).model_dump_for_openapi()["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []
    parameters = flow.validate_parameters(deployment["parameters"])
    load = load_sweep if name == "run_sweep" else load_experiment
    assert load(parameters["config_file"], parameters.get("overrides") or [])
    assert deployment["work_pool"]["name"] == "luffy"


def test_every_flow_has_a_deployment_of_its_own_name():
    assert len({one["name"] for one in DEPLOYMENTS}) == len(DEPLOYMENTS)
    flows = {
        f"luffy.flows.{path.stem}.{name}"
        for path in Path("flows").glob("*.py")
        for name in re.findall(r"^@flow\(.*?\)\ndef (\w+)", path.read_text(), re.MULTILINE | re.DOTALL)
    }
    assert flows == {deployment["entrypoint"] for deployment in DEPLOYMENTS} != set()


def test_a_deployment_with_steps_says_how_another_model_takes_their_place():
    (deployment,) = [one for one in DEPLOYMENTS if "steps" in one["parameters"]]
    assert "-p 'steps=[]'" in deployment["description"]
    config = load_experiment(deployment["parameters"]["config_file"])
    with refused("steps=[]", error=ConfigError):
        evaluated(config, EvaluatedModel("some/model", tuple(deployment["parameters"]["steps"])))
    assert evaluated(config, EvaluatedModel("some/model")).model.path == "some/model"
