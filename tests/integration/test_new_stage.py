"""A stage of one's own, which is one module beside the experiment; and chains that no fixed order has, on a model that
trains: each stage goes on from the policy before it, and a second run of RL that was killed comes to the same bits."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.kills import before_update, left_at
from support.patience import ran
from support.prefect_api import shared_api, without_prefect
from support.stages import CONFIGS, ROOT, WEIGHTS, assert_same_result, execute, run_stage

from luffy.config import load_experiment
from luffy.pipeline.experiment import Experiment, open_experiment
from luffy.pipeline.workspace import Workspace

MODULE = """\
from luffy.config.data import DataConfig
from luffy.config.stage_kinds import StageKind
from luffy.config.strict import StrictModel
from luffy.stages.program import StageResult, main


class CensusOptions(StrictModel):
    unit: str


class CensusSettings(StrictModel):
    data: DataConfig
    options: CensusOptions


CENSUS = StageKind(
    "census",
    "How many training prompts there are",
    inputs={"data": "prompts"},
    pages=("census.txt",),
    settings=CensusSettings,
)


def run(settings, context):
    from luffy.data.parquet import read_prompts

    count = sum(1 for _ in read_prompts(context.inputs["data"] / "train.parquet"))
    (context.out / "census.txt").write_text(f"{settings.options.unit}: {count} of {settings.data.train.num_prompts}")
    return StageResult(("census.txt",), {"prompts": float(count)})


if __name__ == "__main__":
    main(CENSUS, run)
"""
POLICY = """\
import shutil

from luffy.config.stage_kinds import StageKind
from luffy.config.strict import StrictModel
from luffy.stages.program import StageResult, main


class CopySettings(StrictModel):
    seed: int


COPY = StageKind("copy", "The same policy", inputs={"model": "policy"}, provides=("policy",), settings=CopySettings)


def run(settings, context):
    shutil.copytree(context.inputs["model"] / "model", context.out / "model")
    return StageResult(("model",), {})


if __name__ == "__main__":
    main(COPY, run)
"""
EXPERIMENT = f"""\
extends: {CONFIGS}/smoke.yaml
name: counted
stages:
  - prepare_data
  - base
  - count: {{kind: "mystages:CENSUS", options: {{unit: prompts}}}}
  - copied: {{kind: "policies:COPY"}}
  - sft
  - evaluate: {{inputs: {{model: [copied]}}}}
base: {{steps: 2}}
"""


@pytest.mark.slow
def test_a_chain_with_a_stage_of_ones_own_runs_and_is_made_again_where_its_module_or_options_change(tmp_path):
    (tmp_path / "mystages.py").write_text(MODULE)
    (tmp_path / "policies.py").write_text(POLICY)
    (tmp_path / "counted.yaml").write_text(EXPERIMENT)
    env = without_prefect() | shared_api() | {"LUFFY_WORKSPACE": str(tmp_path / "workspace")}

    def flow(*arguments, code=0):
        command = [sys.executable, str(ROOT / "flows/full_pipeline.py"), "counted.yaml", *arguments]
        done = ran(command, cwd=tmp_path, env=env)
        assert done.returncode == code, done.stderr
        return done

    flow()
    run = tmp_path / "workspace/runs/counted-1"
    assert (run / "census.txt").read_text() == "prompts: 24 of 24"

    def read(name):
        return json.loads((run / "stages" / name).read_text())

    assert read("count/manifest.json")["upstream"].keys() == {"data"}
    assert read("sft/manifest.json")["upstream"]["model"] == (run / "stages/copied").resolve().name
    assert read("evaluate_copied/results.json")["checkpoint"] == "copied"

    def plan(*arguments):
        return re.search(r"^count +\w{16} +(\w+) *(.*)", flow("--dry-run", *arguments).stdout, re.MULTILINE).groups()

    assert plan() == ("reused", "")
    assert "options.unit prompts -> rows" in plan("stages.count.options.unit=rows")[1]
    refused = flow("stages.count.options.units=rows", code=2).stderr
    assert "stages.count: options.units: unknown key; did you mean 'unit'?" in refused
    (tmp_path / "mystages.py").write_text(MODULE.replace("prompts there are", "prompts there may be"))
    assert "content of mystages:CENSUS" in plan()[1]


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


def opened(workspace: Path, text: str) -> Experiment:
    file = workspace / "own.yaml"
    file.write_text(HEAD + text)
    return open_experiment(load_experiment(file), Workspace(workspace / "made"))


def differ(one: Path, other: Path) -> bool:
    weights = [load_file(folder / WEIGHTS) for folder in (one, other)]
    return any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_rl_goes_on_from_rl_and_sft_from_rl_also_where_one_was_killed(tmp_path):
    polished = opened(tmp_path, POLISHED)
    run = execute(polished)
    made = {name: polished.plan_node(name) for name in ("base", "sft", "rl", "polish")}
    assert {name: plan.action for name, plan in made.items()} == dict.fromkeys(made, "reuse")
    for name, before in (("sft", "base"), ("rl", "sft"), ("polish", "rl")):
        assert made[name].inputs["model"] == made[before].directory
        assert differ(made[name].directory, made[before].directory)
    assert "polish" in (run / "report.html").read_text()

    # A teacher that the same command has not made: its folder is part of the key of what it teaches alone.
    text = DISTILLED.replace("TEACHER", str(made["sft"].directory / "model"))
    distilled = opened(tmp_path, text)
    plans = {plan.node.name: plan.action for plan in distilled.plan()}
    assert {name for name, action in plans.items() if action == "reuse"} == {"prepare_data", "base", "sft"}
    execute(distilled)
    opd, grpo = distilled.plan_node("opd"), distilled.plan_node("grpo")
    assert (opd.inputs["model"], grpo.inputs["model"]) == (made["base"].directory, opd.directory)
    assert differ(grpo.directory, opd.directory)
    longer = {plan.node.name: plan.action for plan in opened(tmp_path, text.replace("steps: 3", "steps: 4")).plan()}
    assert (longer["opd"], longer["grpo"]) == ("reuse", "continue")

    # A second RL that is killed resumes to the same bits.
    experiment = opened(tmp_path, POLISHED.replace("rl,", "{warm: {kind: rl, rl: {steps: 1}}}, rl,"))
    execute(experiment, "prepare_data", "base", "sft", "warm")
    inputs = dict(experiment.plan_node("rl").inputs)
    assert inputs["model"] == experiment.plan_node("warm").directory
    with left_at(before_update(4), tmp_path / "rl") as left:
        run_stage(experiment.config, "rl", tmp_path / "rl", inputs)
    assert run_stage(experiment.config, "rl", left, inputs).resumed_from == 1
    assert_same_result(tmp_path / "rl", left)
