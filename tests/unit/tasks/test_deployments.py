"""`prefect.yaml`: every deployment names a flow that is there, and parameters that it takes."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from luffy.config import load_experiment
from luffy.config.comparison import load_comparison

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
