"""The experiment as a form: what it says in place of a file's path."""

import copy
from pathlib import Path

import pytest

from luffy.config import load_experiment
from luffy.config.form import experiment_of_form, form_of_file
from luffy.errors import ConfigError

SMOKE = Path("exp_configs/smoke.yaml")


def complaint(values):
    with pytest.raises(ConfigError) as caught:
        experiment_of_form(values)
    return str(caught.value)


def test_overrides_and_extended_files_are_part_of_the_form(tmp_path):
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {SMOKE.resolve()}\nname: child\n")
    form = form_of_file(child, ["rl.steps=3", "method=on_policy"])
    assert "extends" not in form
    assert experiment_of_form(form) == load_experiment(child, ["rl.steps=3", "method=on_policy"])


def test_a_preset_beside_the_file_is_found_from_elsewhere(tmp_path):
    (tmp_path / "mine.yaml").write_text(Path("exp_configs/methods/on_policy.yaml").read_text())
    child = tmp_path / "child.yaml"
    child.write_text(f"extends: {SMOKE.resolve()}\nmethod: mine.yaml\n")
    assert experiment_of_form(form_of_file(child)).objective == load_experiment(child).objective


def test_another_method_brings_its_own_objective():
    form = {**form_of_file(SMOKE), "method": "on_policy"}
    assert experiment_of_form(form).objective == load_experiment(SMOKE, ["method=on_policy"]).objective


def test_an_empty_section_is_left_to_the_presets():
    form = {**form_of_file(SMOKE), "objective": None, "stages": None, "difficulty": None}
    assert experiment_of_form(form) == load_experiment(SMOKE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rl": {"stepz": 1}}, "form: rl.stepz: unknown key; did you mean 'steps'?"),
        ({"method": "luffi"}, "form: no preset 'luffi' in exp_configs/methods/"),
        ({"extends": "x.yaml"}, "form: extends: unknown key; allowed here: base, "),
        (
            {"evaluation": {"max_response_tokens": 32, "suites": {"longr": {"num_samples": 2}}}},
            "did you mean 'longer'?",
        ),
    ],
)
def test_a_mistake_is_the_line_that_the_command_line_prints(change, message):
    found = complaint({**form_of_file(SMOKE), **change})
    assert message in found
    assert found.startswith("form: ")


def test_a_null_that_takes_back_what_a_preset_says_cannot_be_said(tmp_path):
    overrides = ["chain=sft", "method=sft", "sft.epochs=null", "sft.steps=3"]
    child = tmp_path / "child.yaml"
    child.write_text(SMOKE.read_text().replace("  epochs: 2\n", ""))
    assert load_experiment(child, overrides).sft.steps == 3
    with pytest.raises(ConfigError):
        form_of_file(child, overrides)


def test_reading_a_form_does_not_change_it():
    form = form_of_file(Path("exp_configs/luffy_qwen2.5_math_7b.yaml"))
    before = copy.deepcopy(form)
    experiment_of_form(form)
    assert form == before


def test_rules_between_fields_read_as_for_a_file():
    override = "rl.max_staleness=1"
    with pytest.raises(ConfigError) as caught:
        load_experiment(SMOKE, [override])
    form = form_of_file(SMOKE)
    form["rl"]["max_staleness"] = 1
    assert complaint(form).removeprefix("form: ") == str(caught.value).removeprefix("command line: ")
