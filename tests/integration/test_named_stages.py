"""Chains that no fixed order has, on a model that trains: each stage goes on from the policy before it, and a second
run of RL that was killed comes to the same bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.kills import before_update, left_at
from support.stages import CONFIGS, WEIGHTS, assert_same_result, execute, run_stage

from luffy.config import load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.workspace import Workspace

HEAD = f"""\
extends: {CONFIGS}/smoke.yaml
name: own
base: {{steps: 4}}
rl: {{steps: 2, prompts_per_step: 2, prompts_per_update: 1}}
execution: {{checkpoint: {{rl_every: 1}}}}
"""
DISTILLED = """\
stages:
  - prepare_data
  - base
  - sft
  - opd: {kind: rl, method: opd, inputs: {model: base}, rl: {teachers: {base: {kind: model, path: TEACHER}}}}
  - grpo: {kind: rl, method: on_policy, rl: {steps: 3}}
  - evaluate: {inputs: {model: [opd, grpo]}}
  - report
"""
POLISHED = "stages: [prepare_data, base, sft, rl, {polish: {kind: sft, sft: {epochs: 1}}}, evaluate, report]\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("workspace")


def opened(workspace: Path, text: str) -> Experiment:
    file = workspace / "own.yaml"
    file.write_text(HEAD + text)
    return open_experiment(load_experiment(file), Workspace(workspace / "made"))


def differ(one: Path, other: Path) -> bool:
    weights = [load_file(folder / WEIGHTS) for folder in (one, other)]
    return any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rl_goes_on_from_rl_and_sft_from_rl(workspace):
    polished = opened(workspace, POLISHED)
    run = execute(polished)
    made = {name: polished.plan_node(name) for name in ("base", "sft", "rl", "polish")}
    assert {name: plan.action for name, plan in made.items()} == dict.fromkeys(made, "reuse")
    for name, before in (("sft", "base"), ("rl", "sft"), ("polish", "rl")):
        assert made[name].inputs["model"] == made[before].directory
        assert differ(made[name].directory, made[before].directory)
    page = (run / "report.html").read_text()
    assert "polish" in page

    # A teacher that the same command has not made: its folder is part of the key of what it teaches alone.
    text = DISTILLED.replace("TEACHER", str(made["sft"].directory / "model"))
    distilled = opened(workspace, text)
    plans = {plan.node.name: plan.action for plan in distilled.plan()}
    assert {name for name, action in plans.items() if action == "reuse"} == {"prepare_data", "base", "sft"}
    execute(distilled)
    opd, grpo = distilled.plan_node("opd"), distilled.plan_node("grpo")
    assert (opd.inputs["model"], grpo.inputs["model"]) == (made["base"].directory, opd.directory)
    assert differ(grpo.directory, opd.directory)
    longer = {plan.node.name: plan.action for plan in opened(workspace, text.replace("steps: 3", "steps: 4")).plan()}
    assert (longer["opd"], longer["grpo"]) == ("reuse", "continue")


def test_a_second_rl_that_was_killed_resumes_to_the_same_bits(workspace, tmp_path):
    experiment = opened(workspace, POLISHED.replace("rl,", "{warm: {kind: rl, rl: {steps: 1}}}, rl,"))
    execute(experiment, "prepare_data", "base", "sft", "warm")
    inputs = dict(experiment.plan_node("rl").inputs)
    assert inputs["model"] == experiment.plan_node("warm").directory
    with left_at(before_update(4), tmp_path / "rl") as left:
        run_stage(experiment.config, "rl", tmp_path / "rl", inputs)
    assert run_stage(experiment.config, "rl", left, inputs).resumed_from == 1
    assert_same_result(tmp_path / "rl", left)
