"""`luffy config`: values and their origins, fields, and what SFT and RL minimise."""

import json
import re
from pathlib import Path

import pytest
from reference.taught_presets import teacher_overrides

from luffy.cli.commands.config import explain_experiment
from luffy.cli.main import main
from luffy.config import ExperimentConfig, available_presets, load_experiment
from luffy.config.fields import all_fields
from luffy.config.shipped import EXPERIMENTS
from luffy.config.yaml_source import read_yaml
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.workspace import Workspace

FILES = [
    file for file in sorted(EXPERIMENTS.glob("*.yaml")) if not file.name.startswith(("compare_", "grid_", "study_"))
]


@pytest.fixture(autouse=True)
def surroundings(request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)


def line_of(text, key):
    (found,) = re.findall(rf"^ *(?:- )?{key}: .*$", text, re.MULTILINE)
    return " ".join(found.split())


@pytest.mark.parametrize("arguments", [[], ["--given"], ["difficulty={}", "tracking={}", "--given"]], ids=" ".join)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_it_prints_is_a_file_of_the_same_experiment(capsys, tmp_path, path, arguments):
    assert main(["config", str(path), *arguments]) == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert ("# default" in printed.read_text()) == ("--given" not in arguments)
    assert load_experiment(printed) == load_experiment(path, arguments[:-1])


def test_each_value_says_where_it_comes_from(capsys):
    assert main(["config", "smoke", "seed=3", "objective.terms.off_policy.loss.shaping.gamma=0.3"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^seed: 3 +# command line$", out, re.MULTILINE)
    assert line_of(out, "gamma") == "gamma: 0.3 # command line"
    assert re.search(r"^  prompts_per_update: 2 +# exp_configs/smoke.yaml:\d+$", out, re.MULTILINE)
    assert re.search(r"^ +select: off_policy +# preset methods/luffy.yaml:\d+$", out, re.MULTILINE)
    assert line_of(out, "confidence") == "confidence: 0.95 # default"


def test_every_field_is_listed_with_its_type_default_and_meaning(capsys):
    assert main(["config", "rl.optimizer", "--fields"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("rl.optimizer.lr number") for line in shown)
    assert not any(line.startswith("rl.steps") for line in shown)
    fields = {field.path: field for field in all_fields()}
    assert {path.split(".")[0] for path in fields} == set(ExperimentConfig.model_fields)
    values, _ = read_yaml(Path("exp_configs/luffy_qwen2.5_math_7b.yaml"))
    for section in ("rl", "execution", "evaluation"):
        assert {f"{section}.{key}" for key in values[section]} <= fields.keys()
    assert "objective.terms.NAME.loss.shaping.gamma" in fields
    kind = fields["grading.kind"].type
    assert kind.startswith("kind math | kind math_strict | ") and fields["grading"].type == "section"
    assert not any("<" in field.type for field in fields.values())
    assert json.loads(fields["rl.temperature"].default) == 1.0 and fields["rl.steps"].default is None


@pytest.mark.parametrize("method", available_presets("methods"))
def test_every_term_of_a_method_is_explained(method):
    chain = ["chain=sft"] if "\nchain: sft\n" in (EXPERIMENTS / "methods" / f"{method}.yaml").read_text() else []
    overrides = [f"method={method}", *chain, *teacher_overrides(method)]
    explained = explain_experiment("arithmetic", overrides)
    config = load_experiment("arithmetic", overrides)
    objectives = {"sft": config.sft and config.sft.objective, "rl": config.objective}
    assert set(explained) == {"sft", "rl"} & set(config.kinds)
    for stage, text in explained.items():
        for term in objectives[stage].terms:
            assert re.search(rf"^{term.name} +\S", text, re.MULTILINE)
            assert stage == "sft" or not term.needs_teacher or "\nTeacher       q" in text
    for name, teacher in config.rl.teachers.items() if config.rl else ():
        assert f"{teacher.formula()} (rl.teachers.{name})" in explained["rl"]
    assert ("one d for the round" in " ".join(explained.get("rl", "").split())) == (method == "seele")


def test_a_stage_explains_its_own_configuration_as_its_experiment_does(tmp_path):
    experiment = open_experiment(load_experiment("arithmetic"), Workspace(tmp_path))
    for plan in experiment.plan():
        if plan.node.stage in ("sft", "rl"):
            write_job(tmp_path / JOB_FILE, experiment.job(plan))
            expected = explain_experiment("arithmetic")[plan.node.name]
            assert explain_experiment(tmp_path / JOB_FILE) == {plan.node.stage: expected}
