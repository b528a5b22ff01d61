"""A stage of one's own is its program and its entry in the registry: here in a copy of the project."""

import json
import re
import sys

import pytest
from serving import copy_of_the_code
from support.patience import ran
from support.prefect_api import shared_api, without_prefect

pytestmark = pytest.mark.slow
PROGRAM = """\
from luffy.data.parquet import read_prompts
from luffy.files import write_atomic
from luffy.stages.program import StageResult, main


def run(settings, context):
    count = sum(1 for _ in read_prompts(context.inputs["data"] / "train.parquet"))
    write_atomic(context.out / "census.txt", f"{settings.unit}: {count}")
    return StageResult(("census.txt",), {"prompts": float(count)})


if __name__ == "__main__":
    main("census", run)
"""
ENTRY = """\
class CensusSettings(StrictModel):
    unit: str


_KINDS = (
    *_KINDS,
    StageKind(
        "census",
        "How many training prompts there are",
        inputs={"data": "prompts"},
        pages=("census.txt",),
        settings=CensusSettings,
        configure=lambda config: CensusSettings(unit=f"prompts of {config.name}"),
    ),
)
"""


def flow(project, *arguments):
    env = without_prefect() | shared_api() | {"PYTHONPATH": str(project), "LUFFY_WORKSPACE": str(project / "workspace")}
    return ran([sys.executable, "flows/full_pipeline.py", "exp_configs/smoke.yaml", *arguments], cwd=project, env=env)


def test_a_chain_with_a_custom_stage_runs_and_is_reused(tmp_path):
    project = tmp_path / "project"
    copy_of_the_code(project, "luffy", "flows", "tasks", "exp_configs", "data")
    (project / "luffy/stages/census.py").write_text(PROGRAM)
    registry = project / "luffy/config/stage_kinds.py"
    before, after = registry.read_text().split("STAGE_KINDS: Mapping")
    registry.write_text(f"{before}{ENTRY}STAGE_KINDS: Mapping{after}")
    chain = ("stages=[prepare_data, base, census]", "base.steps=2")
    first = flow(project, *chain)
    assert first.returncode == 0, first.stderr
    assert (project / "workspace/runs/smoke-1/census.txt").read_text().startswith("prompts of smoke: ")
    (manifest,) = (project / "workspace/stages/census").glob("*/manifest.json")
    assert json.loads(manifest.read_text())["upstream"].keys() == {"data"}
    again = flow(project, *chain, "--dry-run")
    assert re.search(r"^census +\w{16} +reused", again.stdout, re.MULTILINE), again.stdout
