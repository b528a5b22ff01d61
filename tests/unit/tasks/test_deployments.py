"""`prefect.yaml`: every deployment names a flow that is there, and parameters that it takes."""

import re
from pathlib import Path

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object

from luffy.config import load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.errors import ConfigError

DEPLOYMENTS = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]


def flow_of(deployment):
    return import_object(deployment["entrypoint"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one["entrypoint"].rsplit(".")[-1])
def test_every_field_of_a_run_is_described_in_the_ui(deployment):
    fields = parameter_schema(flow_of(deployment)).model_dump_for_openapi()["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_can_be_run_as_it_is(deployment):
    name = deployment["entrypoint"].rpartition(".")[2]
    parameters = flow_of(deployment).validate_parameters(deployment["parameters"])
    load = load_sweep if name == "run_sweep" else load_experiment
    assert load(parameters["config_file"], parameters.get("overrides") or [])
    assert deployment["work_pool"]["name"] == "luffy"


def test_deployments_have_distinct_names():
    names = [one["name"] for one in DEPLOYMENTS]
    assert len({*names}) == len(names)


def test_every_flow_has_a_deployment():
    flows = {
        f"luffy.flows.{path.stem}.{name}"
        for path in Path("flows").glob("*.py")
        for name in re.findall(r"^@flow\(.*?\)\ndef (\w+)", path.read_text(), re.MULTILINE | re.DOTALL)
    }
    assert flows
    assert flows == {deployment["entrypoint"] for deployment in DEPLOYMENTS}


def test_a_deployment_with_steps_says_how_another_model_takes_their_place():
    (deployment,) = [one for one in DEPLOYMENTS if "steps" in one["parameters"]]
    assert "-p 'steps=[]'" in deployment["description"]
    config = load_experiment(deployment["parameters"]["config_file"])
    with pytest.raises(ConfigError, match=r"model with steps=\[\], or only steps"):
        evaluated(config, EvaluatedModel("some/model", tuple(deployment["parameters"]["steps"])))
    assert evaluated(config, EvaluatedModel("some/model")).model.path == "some/model"
