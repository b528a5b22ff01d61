"""`prefect.yaml`: every deployment names a flow that is there, and parameters that it takes."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.importtools import import_object
from prefect.utilities.schema_tools.validation import validate
from prefect.utilities.templating import apply_values

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.derived import EvaluatedModel, evaluated
from luffy.config.form import experiment_of_form, form_of_file
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.config.training import RLConfig
from luffy.errors import ConfigError

DEPLOYMENTS = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]


THIN = [one for one in DEPLOYMENTS if "config_file" in one["parameters"]]
(FORM,) = [one for one in DEPLOYMENTS if "experiment" in one["parameters"]]
ARITHMETIC = Path("exp_configs/arithmetic.yaml")
MANY_RUNS = [file for kind in ("compare", "grid", "study") for file in Path("exp_configs").glob(f"{kind}_*")]
"""Comparisons, grids and studies, which are no experiments."""


def flow_of(deployment):
    return import_object(deployment["entrypoint"])


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda one: one["entrypoint"].rsplit(".")[-1])
def test_every_field_of_a_run_is_described_in_the_ui(deployment):
    fields = parameter_schema(flow_of(deployment)).model_dump_for_openapi()["properties"]
    assert [name for name, field in fields.items() if not field.get("description")] == []


@pytest.fixture(scope="module")
def form_schema():
    return parameter_schema(flow_of(FORM)).model_dump_for_openapi()


def refusals(schema, values):
    """What Prefect's server says when the form is handed in."""
    return [error.message for error in validate({"experiment": values, "verify": False}, schema)]


@pytest.mark.parametrize("deployment", THIN, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_can_be_run_as_it_is(deployment):
    name = deployment["entrypoint"].rpartition(".")[2]
    parameters = flow_of(deployment).validate_parameters(deployment["parameters"])
    load = load_sweep if name == "run_sweep" else load_experiment
    assert load(parameters["config_file"], parameters.get("overrides") or [])
    assert deployment["work_pool"]["name"] == "luffy"


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


@pytest.fixture(scope="module")
def form_parameters():
    """The parameters as `prefect deploy` makes them: the build step run, its output filled in."""
    ((name, settings),) = FORM["build"][-1].items()
    values = import_object(name)(config_file=settings["config_file"])
    return apply_values(FORM["parameters"], {settings["id"]: values})


def test_the_form_starts_with_the_values_of_the_file(form_parameters):
    parameters = flow_of(FORM).validate_parameters(form_parameters)
    assert parameters["verify"] is False
    assert experiment_of_form(parameters["experiment"]) == load_experiment(ARITHMETIC)


def test_the_form_shows_every_field_with_its_name_description_and_default(form_schema):
    shown = form_schema["properties"]["experiment"]["properties"]
    assert set(shown) == set(ExperimentConfig.model_fields)
    assert shown["rl"]["title"] == "Rl"
    assert "luffy" in shown["method"]["anyOf"][0]["enum"]
    rl, vllm = form_schema["definitions"]["RLConfig"]["properties"], form_schema["definitions"]["VLLMConfig"]
    assert set(rl) == set(RLConfig.model_fields)
    assert rl["temperature"]["description"].endswith("Default: 1.0, unless the method sets it.")
    assert shown["seed"]["default"] == 0
    assert vllm["properties"]["max_num_seqs"]["description"] == "Sequences decoded at the same time."
    assert "discriminator" not in json.dumps(form_schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 1}, "'stepz' was unexpected"),
        ({"seed": -1}, "-1 is less than the minimum of 0"),
        ({"cluster": "slurm"}, "'slurm' is not one of ['local', 'ray']"),
        ({"method": "luffi"}, "'luffi' is not valid"),
        ({"rl": {"steps": "many"}}, "is not valid"),
    ],
)
def test_wrong_values_are_refused_when_the_form_is_handed_in(form_schema, form_parameters, change, message):
    values = form_parameters["experiment"]
    assert refusals(form_schema, values) == []
    (found,) = refusals(form_schema, {**values, **change})
    assert message in found


@pytest.mark.parametrize("path", sorted(set(Path("exp_configs").glob("*.yaml")) - set(MANY_RUNS)))
def test_every_experiment_fits_the_form_and_is_the_same_experiment(form_schema, path):
    values = form_of_file(path)
    assert refusals(form_schema, values) == []
    assert experiment_of_form(values) == load_experiment(path)
    spelled_out = json.loads(load_experiment(path).model_dump_json())
    assert refusals(form_schema, spelled_out) == []


def filled_in(schema, definitions, values):
    """What the UI hands in for `values`: with every default that the schema gives, as far down as values reach."""
    if isinstance(values, dict):
        known = {}
        for branch in [schema, *schema.get("anyOf", [])]:
            model = definitions[branch["$ref"].split("/")[-1]] if "$ref" in branch else branch
            if set(values) <= set(model.get("properties", {})):
                known = known or model.get("properties", {})
        given = {name: filled_in(part, definitions, values[name]) for name, part in known.items() if name in values}
        return {**{name: part["default"] for name, part in known.items() if "default" in part}, **values, **given}
    return values


@pytest.mark.parametrize("overrides", [[], ["method=sft"], ["method=ppo"], ["method=chord", "chain=rl"]])
def test_what_the_ui_fills_in_changes_nothing(form_schema, overrides):
    values = form_of_file(ARITHMETIC, overrides)
    definitions = form_schema["definitions"]
    handed_in = filled_in(form_schema["properties"]["experiment"], definitions, values)
    assert handed_in["execution"]["packing"] is False
    assert handed_in["rl"]["critic"] is None
    assert refusals(form_schema, handed_in) == []
    assert experiment_of_form(handed_in) == load_experiment(ARITHMETIC, overrides)
