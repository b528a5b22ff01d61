"""flows/compare_methods.py with real stages of smoke.yaml's size: arms that learn, one that fails, the same twice."""

import contextlib
import json
import re
import signal
from pathlib import Path

import psutil
import pytest
from flow_process import run, start, states
from patience import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
COMPARISON = f"""\
name: small
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: [grading.kind=exact, evaluation.max_response_tokens=16, data.suites.other_mix=null,
  data.suites.retention=null]
seeds: [1, 2]
reference: luffy
budget: {{optimizer_steps: 6}}
workers: 2
arms:
  luffy: {{chain: rl, method: luffy}}
  sft_then_rl: {{chain: sft_then_rl, method: on_policy, sft_steps: 2}}
  broken: {{chain: sft_then_luffy, method: luffy, sft_steps: 2, overrides: [sft.num_traces=9999]}}
"""
SHARED = {"prepare_data", "base", "evaluate_base"}


def processes_of(workspace):
    """Live ones whose environment names the workspace: the flow's own and those of its stages."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            environment = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
            if environment.get("LUFFY_WORKSPACE") == str(workspace):
                found.append(process)
    return found


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "small.yaml").write_text(COMPARISON)
    return folder, run(folder / "workspace", folder / "small.yaml")


def test_arms_learn_side_by_side_and_a_failed_one_is_shown_as_failed(compared):
    folder, result = compared
    assert result.returncode == 1
    found = states(result)
    learned = {f"{arm} {seed}: rl" for arm in ("luffy", "sft_then_rl") for seed in (1, 2)}
    assert {name for name, state in found.items() if state == "failed"} == {"broken 1: sft", "broken 2: sft"}
    assert {name: found[name] for name in SHARED | learned} == dict.fromkeys(SHARED | learned, "finished")
    assert "2 of 6 runs have failed" in result.stderr
    assert re.search(r"^broken, seed 1: .*sft.num_traces is 9999", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr
    data = json.loads((folder / "workspace/runs/small-1/comparison.json").read_text())
    luffy, then, broken = data["arms"]
    assert (luffy["finished_seeds"], then["finished_seeds"], broken["finished_seeds"]) == ([1, 2], [1, 2], [])
    assert luffy["cost_a_seed"]["optimizer_steps"] == then["cost_a_seed"]["optimizer_steps"] == 6
    # 3 RL steps of 4 prompts x 7 rollouts; 2 of 4 x 8.
    assert (luffy["cost_a_seed"]["rollouts"], then["cost_a_seed"]["rollouts"]) == (3 * 28, 2 * 32)
    assert [point["steps"] for point in then["curve"]] == [4, 6]
    assert luffy["cost_a_seed"]["peak_memory_gib"] > 0
    assert len(then["minus_reference"]) == 2 * 2  # suites, decodings
    page = (folder / "workspace/runs/small-1/comparison.html").read_text()
    assert "Failed runs" in page and "Over optimizer steps" in page
    assert {path.name for path in (folder / "workspace/runs/small-1/arms").iterdir()} == {
        f"{arm}-{seed}" for arm in ("luffy", "sft_then_rl", "broken") for seed in (1, 2)
    }


def test_shared_stages_are_made_once(compared):
    stages = compared[0] / "workspace" / "stages"
    made = {
        stage: len(list((stages / stage).glob("*/manifest.json"))) for stage in ("prepare_data", "base", "sft", "rl")
    }
    assert made == {"prepare_data": 1, "base": 1, "sft": 2, "rl": 4}
    assert len(list((stages / "evaluate").glob("*/manifest.json"))) == 1 + 4


def test_the_same_command_reuses_everything_except_the_failed_arm(compared):
    folder, _ = compared
    again = run(folder / "workspace", folder / "small.yaml", "workers=1")  # so that one warm server is enough
    assert again.returncode == 1
    found = states(again)
    assert {name for name, state in found.items() if state != "reused"} == {"broken 1: sft", "broken 2: sft"}
    first, second = (json.loads((folder / f"workspace/runs/small-{n}/comparison.json").read_text()) for n in (1, 2))
    assert first == second


def test_a_mistake_is_one_line(compared):
    """`test_tuned_comparison` has a comparison without a failing arm, which succeeds."""
    folder, _ = compared
    wrong = run(folder / "workspace", folder / "small.yaml", "arms.luffy.overrides=[rl.steps=9]")
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "it would change the budget" in wrong.stderr


def test_ctrl_c_ends_all_runs_at_once_and_the_same_command_resumes(compared):
    folder, _ = compared
    workspace = folder / "workspace"
    (folder / "good.yaml").write_text(re.sub(r"  broken.*\n", "", COMPARISON))
    long = ("name=stopped", "budget.optimizer_steps=40000", "arms.sft_then_rl.sft_steps=20000")
    process = start(workspace, folder / "good.yaml", *long)
    awaited = {r" sft_then_rl 1: sft: step \d+", r" luffy 1: rl: step \d+"}
    for line in process.stdout:
        awaited -= {pattern for pattern in awaited if re.search(pattern, line)}
        if not awaited:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "interrupted; the same command resumes" in err
    assert processes_of(workspace) == []
    records = [json.loads((path / "run.json").read_text()) for path in (workspace / "runs").glob("stopped*")]
    assert len(records) == 3  # its own, and those of the two runs that had begun
    assert {record["state"] for record in records} == {"interrupted"}
    plan = run(workspace, folder / "good.yaml", *long, "--dry-run").stdout
    for begun in ("sft_then_rl 1 +sft", "luffy 1 +rl"):  # "resume from step 12", once it has a checkpoint
        assert re.search(rf"^{begun} +\w{{16}} .*interrupted", plan, re.MULTILINE)
    assert re.search(r"^all +evaluate_base +\w{16} +reused", plan, re.MULTILINE)
