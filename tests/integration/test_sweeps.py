"""`luffy compare`, `grid` and `study` over stages of smoke.yaml's size.

One comparison has arms that learn side by side, one that fails, and Ctrl-C. The others have their stages in the flow's
own process: arms tuned, killed among their tries, then a grid in the same workspace; a study resumed and collected.
"""

import json
import re
import signal
from pathlib import Path

import pytest
from campaigns.random_kills import processes_of
from flow_process import IN_PROCESS, run, start, states
from support.patience import PATIENCE_S

from luffy.cli.main import main
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.evaluation.across_runs.run_results import read_sweep_results, result_files, write_results
from luffy.evaluation.results import read_results

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
COMPARISON = f"""\
name: small
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: [grading.kind=exact, evaluation.max_response_tokens=16, data.suites.other_mix=null,
  data.suites.retention=null]
seeds: [1]
reference: luffy
budget: {{optimizer_steps: 6}}
workers: 2
arms:
  luffy: {{chain: rl, method: luffy}}
  sft_then_rl: {{chain: sft_then_rl, method: on_policy, sft_steps: 2}}
  broken: {{chain: sft_then_luffy, method: luffy, sft_steps: 2, overrides: [sft.num_traces=9999]}}
"""
SHARED = {"prepare_data", "base", "evaluate_base"}
SMALL = """\
[grading.kind=exact, evaluation.max_response_tokens=16, base.steps=4, data.validation_prompts=6,
  data.suites.other_mix=null, data.suites.retention=null, evaluation.decodings.sampled=null]"""
TUNED = f"""\
name: tuned
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: {SMALL}
seeds: [1]
reference: luffy
budget: {{optimizer_steps: 4}}
workers: 1
select: {{on: validation, seeds: [100]}}
arms:
  sft: {{chain: sft, method: sft, grid: {{sft.optimizer.lr: [1e-3, 3e-3]}}}}
  luffy: {{chain: rl, method: luffy, grid: {{rl.optimizer.lr: [1e-3, 3e-3]}}}}
"""
GRID = f"""\
name: rates
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: {SMALL[:-1]}, chain=sft, method=sft, sft.epochs=null, sft.steps=4]
grid: {{sft.optimizer.lr: [1e-3, 3e-3], sft.num_traces: [8, 9999]}}
seeds: [100]
"""
CELLS = ("--cells", "centre")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    (folder / "small.yaml").write_text(COMPARISON)
    return folder, run(folder / "workspace", "compare", folder / "small.yaml")


def test_arms_learn_side_by_side_and_a_failed_one_is_shown_as_failed(compared):
    folder, result = compared
    assert result.returncode == 1
    found = states(result)
    learned = {"luffy 1: rl", "sft_then_rl 1: rl"}
    assert {name for name, state in found.items() if state == "failed"} == {"broken 1: sft"}
    assert {name: found[name] for name in SHARED | learned} == dict.fromkeys(SHARED | learned, "finished")
    assert "1 of 3 runs have failed" in result.stderr
    assert re.search(r"^broken, seed 1: .*sft.num_traces is 9999", result.stderr, re.MULTILINE)
    assert re.search(r"^[\d:]+ broken 1: failed: .*sft.num_traces is 9999", result.stdout, re.MULTILINE)  # at once
    assert "Traceback" not in result.stderr
    data = json.loads((folder / "workspace/runs/small-1/comparison.json").read_text())
    luffy, then, broken = data["arms"]
    assert (luffy["finished_seeds"], then["finished_seeds"], broken["finished_seeds"]) == ([1], [1], [])
    assert luffy["cost_a_seed"]["optimizer_steps"] == then["cost_a_seed"]["optimizer_steps"] == 6
    # 3 RL steps of 4 prompts x 7 rollouts; 2 of 4 x 8.
    assert (luffy["cost_a_seed"]["rollouts"], then["cost_a_seed"]["rollouts"]) == (3 * 28, 2 * 32)
    assert [point["steps"] for point in then["curve"]] == [4, 6]
    assert luffy["cost_a_seed"]["peak_memory_gib"] > 0
    assert len(then["minus_reference"]) == 2 * 2  # suites, decodings
    page = (folder / "workspace/runs/small-1/comparison.html").read_text()
    assert "Failed runs" in page and "Over optimizer steps" in page
    made = {path.name for path in (folder / "workspace/runs/small-1/arms").iterdir()}
    assert made == {"luffy-1", "sft_then_rl-1", "broken-1"}
    stages = folder / "workspace" / "stages"
    made = {kind.name: len(list(kind.glob("*/manifest.json"))) for kind in stages.iterdir()}
    expected = {"prepare_data": 1, "base": 1, "sft": 1, "rl": 2, "evaluate": 1 + 2}  # what runs share is made once
    assert {kind: made[kind] for kind in expected} == expected


def test_the_same_command_reuses_everything_except_the_failed_arm(compared, capsys):
    folder, _ = compared
    where = [str(folder / "small.yaml"), "--workspace", str(folder / "workspace")]
    assert main(["compare", *where, "arms.luffy.overrides=[rl.steps=9]"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "it would change the budget" in said
    table = folder / "workspace/runs/small-1/comparison.json"
    first = json.loads(table.read_text())
    again = run(folder / "workspace", "compare", folder / "small.yaml", "workers=1", flow=IN_PROCESS)
    assert again.returncode == 1
    found = states(again)
    assert {name for name, state in found.items() if state != "reused"} == {"broken 1: sft"}
    assert json.loads(table.read_text()) == first, "a run that has failed goes on"


def test_ctrl_c_ends_all_runs_at_once_and_the_same_command_resumes(compared):
    folder, _ = compared
    workspace = folder / "workspace"
    (folder / "good.yaml").write_text(re.sub(r"  broken.*\n", "", COMPARISON))
    long = ("name=stopped", "budget.optimizer_steps=40000", "arms.sft_then_rl.sft_steps=20000")
    process = start(workspace, "compare", folder / "good.yaml", *long)
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
    plan = run(workspace, "compare", folder / "good.yaml", *long, "--dry-run").stdout
    for begun in ("sft_then_rl 1 +sft", "luffy 1 +rl"):  # "resume from step 12", once it has a checkpoint
        assert re.search(rf"^{begun} +\w{{16}} .*interrupted", plan, re.MULTILINE)
    assert re.search(r"^all +evaluate_base +\w{16} +reused", plan, re.MULTILINE)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A workspace with a comparison that was killed in the tries of its second arm, and then started again."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tuned.yaml").write_text(TUNED)
    (folder / "rates.yaml").write_text(GRID)
    process = start(folder / "workspace", "compare", folder / "tuned.yaml", flow=IN_PROCESS)
    assert any(re.search(r"luffy 100 \(.*\): rl: finished", line) for line in process.stdout)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    return folder, run(folder / "workspace", "compare", folder / "tuned.yaml", flow=IN_PROCESS)


def test_a_killed_tuning_repeats_no_finished_try_and_what_it_chose_is_run(tuned):
    folder, result = tuned
    assert result.returncode == 0, result.stderr
    found, page = states(result), folder / "workspace" / "runs" / "tuned-1"
    tries = {name: state for name, state in found.items() if " 100 (" in name}
    assert {state for name, state in tries.items() if name.startswith("sft 100")} == {"reused"}
    assert [name for name, state in tries.items() if name.endswith(": rl") and state == "reused"]
    assert {found[name] for name in ("sft 1: sft", "luffy 1: rl")} == {"finished"}
    section = {"sft": "sft", "luffy": "rl"}
    for arm in json.loads((page / "comparison.json").read_text())["tuning"]["arms"]:
        assert (len(arm["tries"]), arm["cost"]["optimizer_steps"]) == (2, 2 * 4)
        best = max(arm["tries"], key=lambda each: each["accuracy"]["value"])  # the first of equal ones
        assert arm["chosen"] == best["values"]
        record = json.loads((page / "arms" / f"{arm['arm']}-1" / "run.json").read_text())
        assert record["config"][section[arm["arm"]]]["optimizer"]["lr"] == next(iter(arm["chosen"].values()))
    evaluated = {
        name: {row.suite for row in read_results(page / "arms" / name / "stages" / stage / "results.json").rows}
        for name, stage in (("sft.1-100", "evaluate_sft"), ("sft-1", "evaluate_sft"), ("luffy-1", "evaluate_rl"))
    }
    reported = {"in_distribution", "longer"}
    assert evaluated == {"sft.1-100": {"validation"}, "sft-1": reported, "luffy-1": reported}


def test_a_grid_reuses_what_is_there_and_shows_a_failed_point_as_failed(tuned):
    folder, _ = tuned
    result = run(folder / "workspace", "compare", folder / "rates.yaml", flow=IN_PROCESS)
    assert result.returncode == 1
    assert "2 of 4 runs have failed" in result.stderr and "Traceback" not in result.stderr
    found = states(result)
    first = "rates 100 (sft.optimizer.lr=0.001, sft.num_traces=8)"
    assert {found[f"{first}: {stage}"] for stage in ("prepare_data", "base", "sft")} == {"reused"}
    assert found[f"{first}: evaluate_sft"] == "finished"  # of the reported suites; tuning had evaluated another
    directory = folder / "workspace" / "runs" / "rates-1"
    points = json.loads((directory / "grid.json").read_text())["points"]
    assert [point["finished_seeds"] for point in points] == [[100], [], [100], []]
    assert {row["suite"] for row in points[0]["accuracy"]} == {"in_distribution", "longer"}
    assert "Failed runs" in (directory / "grid.html").read_text()


def test_a_study_goes_on_without_its_finished_runs_is_collected_and_refuses_what_differs(tmp_path):
    shipped = ROOT / "exp_configs"
    text = (shipped / "study_smoke.yaml").read_text().replace("smoke.yaml", f"{shipped}/smoke.yaml")
    smaller = {"seeds: [1, 2]\n": "seeds: [1]\n", "workers: 2\n": "workers: 1\n"}
    for given, small in {**smaller, "\noverrides: [": "\noverrides: [grading.kind=exact, "}.items():
        assert given in text
        text = text.replace(given, small)
    design = tmp_path / "design.yaml"
    design.write_text(text)

    def study(*options, code=0):
        result = run(tmp_path / "workspace", "compare", design, *options, flow=IN_PROCESS)
        assert result.returncode == code, result.stderr
        return result

    study(*CELLS)
    assert not re.search(r"^\d\d:\d\d:\d\d centre\.", study(*CELLS).stdout, re.MULTILINE)
    out = study(*CELLS, "--dry-run").stdout
    assert " reused " in out and " run " not in out.partition("\n")[2].replace(" 4 runs", "")
    study("--collect", "--page")
    written = {path.name for path in tmp_path.glob("study_smoke.*")}
    assert written == {f"study_smoke.{name}" for name in ("results.parquet", "outcomes.parquet", "html", "svg")}
    files = result_files(design, load_sweep(design).design.name)
    results = read_sweep_results(files)
    first, *rest = results.outcomes["correct"][0]  # of the base
    results.outcomes.at[0, "correct"] = (first + 1, *rest)
    write_results(results, files)
    err = study("--collect", code=2).stderr
    assert err.count("\n") == 1 and "does not go with workspace" in err and "(centre, " in err
