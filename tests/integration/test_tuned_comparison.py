"""Arms tuned, the comparison killed among its tries, then a grid in the same workspace: real stages.

One run at a time, so that each flow needs one warm server, and graded without a process for it; `test_compare_methods`
has runs side by side.
"""

import json
import re
from pathlib import Path

import pytest
from flow_process import run, start, states

from luffy.evaluation.results import read_results

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
SMALL = """\
[grading.kind=exact, evaluation.max_response_tokens=16, base.steps=4, data.validation_prompts=6,
  data.suites.other_mix=null, data.suites.retention=null, evaluation.decodings.sampled=null]"""
COMPARISON = f"""\
name: tuned
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: {SMALL}
seeds: [1]
reference: luffy
budget: {{optimizer_steps: 4}}
workers: 1
select: {{on: validation, seeds: [100]}}
arms:
  sft: {{chain: sft, method: sft, grid: {{sft.optimizer.lr: [1e-3, 3e-3, 1e-2]}}}}
  luffy: {{chain: rl, method: luffy, grid: {{rl.optimizer.lr: [1e-3, 3e-3, 1e-2]}}}}
"""
GRID = f"""\
name: rates
experiment: {ROOT}/exp_configs/smoke.yaml
overrides: {SMALL[:-1]}, chain=sft, method=sft, sft.epochs=null, sft.steps=4]
grid: {{sft.optimizer.lr: [1e-3, 3e-3], sft.num_traces: [8, 9999]}}
seeds: [100]
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A workspace with a comparison that was killed in the tries of its second arm, and then started again."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "tuned.yaml").write_text(COMPARISON)
    (folder / "rates.yaml").write_text(GRID)
    process = start(folder / "workspace", folder / "tuned.yaml")
    for line in process.stdout:
        if re.search(r"luffy 100 \(.*\): rl: finished", line):
            break
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    return folder, run(folder / "workspace", folder / "tuned.yaml")


@pytest.fixture(scope="module")
def page(tuned):
    """The directory of the page of the second start."""
    folder, result = tuned
    assert result.returncode == 0, result.stderr
    return folder / "workspace" / "runs" / "tuned-2"


def test_a_killed_comparison_repeats_none_of_its_finished_tries(tuned, page):
    tries = {name: state for name, state in states(tuned[1]).items() if " 100 (" in name}
    assert {state for name, state in tries.items() if name.startswith("sft 100")} == {"reused"}
    assert [name for name, state in tries.items() if name.endswith(": rl") and state == "reused"]
    for arm in json.loads((page / "comparison.json").read_text())["tuning"]["arms"]:
        assert len(arm["tries"]) == 3
        assert arm["cost"]["optimizer_steps"] == 3 * 4


def test_arms_are_tuned_on_the_validation_split_alone_and_then_run_with_what_was_chosen(tuned, page):
    found = states(tuned[1])
    assert {found[name] for name in ("sft 1: sft", "luffy 1: rl")} == {"finished"}
    section = {"sft": "sft", "luffy": "rl"}
    for arm in json.loads((page / "comparison.json").read_text())["tuning"]["arms"]:
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
    text = (page / "comparison.html").read_text()
    assert "evaluated only on validation" in text and "Every arm had 3 tries" in text


def test_a_grid_reuses_what_is_there_and_shows_a_failed_point_as_failed(tuned):
    folder, _ = tuned
    result = run(folder / "workspace", folder / "rates.yaml", flow="run_grid")
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
    page = (directory / "grid.html").read_text()
    assert (
        "Failed runs" in page and page.count("; opacity: ") == 2 * 2
    )  # a map for each suite, without the failed points
