"""An environment of verifiers through the real flow; a small package takes the place of verifiers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
from patience import PATIENCE_S
from prefect_api import shared_api

from luffy.evaluation.sample_files import read_samples_of
from luffy.tracking.metrics import METRICS_FILE, read_metrics

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
FAKES = ROOT / "tests" / "synthetic" / "fake_verifiers"
PACKAGE = f"environment: fake-environments, arguments: {{which: countdowns, num_tasks: 24}}, python: {sys.executable}"
COUNTDOWNS = [
    "chain=rl",
    "method=on_policy",
    f"data.train={{kind: verifiers, {PACKAGE}}}",
    "data.corpus={kind: guess_number, num_prompts: 256, high: 7, player: random, max_turns: 3}",
    f"data.suites={{games: {{kind: verifiers, {PACKAGE}, split: eval, equal_prompts: true}}}}",
    "model.architecture={hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, "
    "max_position_embeddings: 192}",
    "base.steps=60",
    "base.batch_size=32",
    "rl={steps: 2, prompts_per_step: 4, max_response_tokens: 96, optimizer: {lr: 1e-3}}",
    "evaluation={max_response_tokens: 96, decodings: {greedy: {temperature: 0.0}}}",
    f"environment={{kind: verifiers, {PACKAGE}, limits: {{max_turns: 3, max_turn_tokens: 8}}}}",
    "execution={num_threads: 1, retries: 0}",
]


def flow(workspace: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **shared_api(), "LUFFY_WORKSPACE": str(workspace), "PYTHONPATH": str(FAKES), **variables}
    command = [sys.executable, "flows/full_pipeline.py", "exp_configs/guess_number.yaml", *COUNTDOWNS]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = tmp_path_factory.mktemp("workspace")
    result = flow(workspace)
    assert result.returncode == 0, result.stdout + result.stderr
    return workspace / "stages"


def only(stages: Path, kind: str) -> Path:
    (directory,) = (path.parent for path in (stages / kind).glob("*/manifest.json"))
    return directory


def test_the_reward_of_a_rollout_is_the_environments(stages: Path) -> None:
    rows = [
        row for file in (only(stages, "rl") / "journal").glob("*.parquet") for row in pq.read_table(file).to_pylist()
    ]
    assert len(rows) == 2 * 4 * 8
    for row in rows:
        measures = dict(row["measures"])
        assert row["reward"] == measures["reward"] == measures["share"] == pytest.approx(measures["turns"] / 3)
        assert measures["num_turns"] == measures["turns"]
    assert {row["outcome"] for row in rows} <= {"correct", "wrong"}


def test_metrics_have_every_reward_function(stages: Path) -> None:
    for row in read_metrics(only(stages, "rl") / METRICS_FILE):
        assert row["rollout/share_mean"] == pytest.approx(row["rollout/reward_mean"])


def test_evaluation_takes_the_environments_verdict(stages: Path) -> None:
    (directory, *_) = (path.parent for path in (stages / "evaluate").glob("*/manifest.json"))
    records = list(read_samples_of(directory))
    assert len(records) == 4
    assert all(record.correct == (record.measures["reward"] >= 1.0) for record in records)
    assert {record.grader for record in records} == {"measure"}


def hosts(workspace: Path) -> list[psutil.Process]:
    """Foreign interpreters of the runs in a workspace."""
    found = [each for each in psutil.process_iter(["cmdline"]) if "verifiers_host.py" in str(each.info["cmdline"])]
    return [each for each in found if str(workspace) in str(each.environ())]


def test_nothing_is_left_running(stages: Path) -> None:
    assert hosts(stages.parent) == []


def test_a_kill_of_the_foreign_interpreter_in_the_middle_of_an_answer_costs_no_bit(
    stages: Path, tmp_path: Path
) -> None:
    workspace, die_at = tmp_path / "workspace", tmp_path / "die_at"
    shutil.copytree(stages.parent, workspace, symlinks=True)
    shutil.rmtree(workspace / "stages" / "rl")
    die_at.touch()
    killed = flow(workspace, TEST_DIE_AT=str(die_at))
    assert killed.returncode != 0 and not die_at.exists()
    assert "the environment fake-environments of verifiers" in killed.stdout + killed.stderr
    assert [file.name for file in workspace.glob("stages/rl/*/journal/*.parquet")] == ["step_000001.parquet"]
    assert hosts(workspace) == []
    again = flow(workspace)
    assert again.returncode == 0, again.stdout + again.stderr
    ours, undisturbed = only(workspace / "stages", "rl"), only(stages, "rl")
    for name in ("journal/step_000001.parquet", "journal/step_000002.parquet", "model/model.safetensors"):
        assert (ours / name).read_bytes() == (undisturbed / name).read_bytes()
