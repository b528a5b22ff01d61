"""A stage of one's own is one module beside the experiment, which names it by its import path."""

import json
import re
import sys

import pytest
from support.patience import ran
from support.prefect_api import shared_api, without_prefect
from support.stages import CONFIGS, ROOT

pytestmark = pytest.mark.slow
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


def test_a_chain_with_a_stage_of_ones_own_runs_and_is_made_again_where_its_module_or_options_change(tmp_path):
    (tmp_path / "mystages.py").write_text(MODULE)
    (tmp_path / "policies.py").write_text(POLICY)
    (tmp_path / "counted.yaml").write_text(EXPERIMENT)
    env = without_prefect() | shared_api() | {"LUFFY_WORKSPACE": str(tmp_path / "workspace")}

    def flow(*arguments):
        command = [sys.executable, str(ROOT / "flows/full_pipeline.py"), "counted.yaml", *arguments]
        done = ran(command, cwd=tmp_path, env=env)
        return done.returncode, done.stdout, done.stderr

    code, _, error = flow()
    assert code == 0, error
    assert (tmp_path / "workspace/runs/counted-1/census.txt").read_text() == "prompts: 24 of 24"
    (manifest,) = (tmp_path / "workspace/stages/census").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["upstream"].keys() == {"data"}
    made = tmp_path / "workspace/runs/counted-1/stages"
    (copied,) = (tmp_path / "workspace/stages/copy").iterdir()
    assert json.loads((made / "sft/manifest.json").read_text())["upstream"]["model"] == copied.name
    assert json.loads((made / "evaluate_copied/results.json").read_text())["checkpoint"] == "copied"

    def plan(*arguments):
        return re.search(r"^count +\w{16} +(\w+) *(.*)", flow("--dry-run", *arguments)[1], re.MULTILINE).groups()

    assert plan() == ("reused", "")
    assert "options.unit prompts -> rows" in plan("stages.count.options.unit=rows")[1]
    code, _, error = flow("stages.count.options.units=rows")
    assert code == 2 and "stages.count: options.units: unknown key; did you mean 'unit'?" in error
    (tmp_path / "mystages.py").write_text(MODULE.replace("prompts there are", "prompts there may be"))
    assert "content of mystages:CENSUS" in plan()[1]
