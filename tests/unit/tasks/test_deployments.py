"""`prefect.yaml`: every deployment names a flow that is there, and parameters that it takes."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from flows.checkpoint_choice import choose
from luffy.config import load_experiment
from luffy.config.comparison import load_comparison
from luffy.errors import ConfigError

DEPLOYMENTS = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["name"])
def test_a_deployment_can_be_run_as_it_is(deployment):
    path, name = deployment["entrypoint"].split(":")
    flow = getattr(import_module(path.removesuffix(".py").replace("/", ".")), name)
    parameters = flow.validate_parameters(deployment["parameters"])
    load = load_comparison if name == "compare_methods" else load_experiment
    assert load(parameters["config_file"], parameters["overrides"])
    assert deployment["work_pool"]["name"] == "luffy"


def test_every_flow_has_a_deployment():
    flows = {
        f"{path}:{name}"
        for path in map(str, Path("flows").glob("*.py"))
        for name in re.findall(r"^@flow\(.*?\)\ndef (\w+)", Path(path).read_text(), re.MULTILINE | re.DOTALL)
    }
    assert flows
    assert flows == {deployment["entrypoint"] for deployment in DEPLOYMENTS}


def test_a_deployment_with_steps_says_how_another_model_takes_their_place():
    (deployment,) = [one for one in DEPLOYMENTS if "steps" in one["parameters"]]
    assert "-p 'steps=[]'" in deployment["description"]
    config = load_experiment(deployment["parameters"]["config_file"])
    with pytest.raises(ConfigError, match=r"model with steps=\[\], or steps alone"):
        choose(config, "some/model", tuple(deployment["parameters"]["steps"]), None)
    assert choose(config, "some/model", (), None).parameters["model"] == "some/model"
