import os
import shutil

import pytest

from luffy.pipeline.plan import differences

COSINE = "rl.optimizer.schedule.kind=cosine"


def decisions(experiment):
    return {plan.node.name: plan.headline for plan in experiment.plan()}


def reasons(experiment):
    return {plan.node.name: plan.reason for plan in experiment.plan()}


def test_everything_runs_in_an_empty_workspace_and_is_reused_when_it_is_finished(opened, finish_all):
    assert set(decisions(opened()).values()) == {"run"}
    assert set(reasons(opened()).values()) == {"first run"}
    finish_all(opened())
    os.utime(opened().plan_node("sft").directory / "model" / "weights", (1, 1))  # as in a copy
    assert set(decisions(opened()).values()) == {"reused"}


BEFORE_SFT = {"prepare_data", "base", "evaluate_base"}
SUITES = ["data.suites.longer=null", "data.suites.own={kind: arithmetic, num_prompts: 4, num_operations: [2]}"]


@pytest.mark.parametrize(
    ("overrides", "stage", "reason", "reused"),
    [
        (["sft.optimizer.lr=2e-3"], "sft", "sft.optimizer.lr 0.001 -> 0.002", BEFORE_SFT),
        (["sft.optimizer.lr=2e-3"], "rl", "different result of sft ({} -> {})", BEFORE_SFT),
        (["model.lora={rank: 4, alpha: 8}"], "sft", "lora added", BEFORE_SFT),
        (["evaluation.confidence=0.9"], "evaluate_rl", "evaluation.confidence", {"prepare_data", "base", "sft", "rl"}),
        (SUITES, "prepare_data", "data.suites.own added, data.suites.longer removed", set()),
    ],
)
def test_a_change_is_named_and_leaves_what_does_not_depend_on_it(opened, finish_all, overrides, stage, reason, reused):
    finish_all(opened())
    after = opened(*overrides)
    keys = [one.identities["sft"].key for one in (opened(), after)]
    assert reasons(after)[stage].startswith(reason.format(*keys)) and " (against " in reasons(after)[stage]
    assert {name for name, decision in decisions(after).items() if decision == "reused"} == reused


def test_the_most_similar_result_explains_and_ties_go_to_the_newest(opened, finish_all):
    finish_all(opened())
    finish_all(opened("sft.optimizer.lr=2e-3", "sft.epochs=9"))
    assert reasons(opened("sft.epochs=8"))["sft"].startswith("sft.epochs 2 -> 8 (against ")
    assert reasons(opened("sft.optimizer.lr=2e-3"))["sft"].startswith("sft.epochs 9 -> 2 (against ")


def test_the_results_of_another_experiment_explain_nothing(opened, finish_all):
    finish_all(opened())
    found = reasons(opened("name=other", "sft.optimizer.lr=2e-3"))
    assert {found["sft"], found["rl"]} == {"first run"}
    assert decisions(opened("name=other", "sft.optimizer.lr=2e-3"))["base"] == "reused"


def test_a_section_in_place_of_null_is_added_and_back_again_removed(opened, finish_all):
    plain, corrected = opened(), opened("rl.correction={kind: truncate}")
    finish_all(plain)
    section = "objective.terms.on_policy.correction"
    assert reasons(corrected)["rl"] == f"{section} added (against {plain.identities['rl'].key})"
    old, new = (one.identities["rl"] for one in (corrected, plain))
    assert list(differences(old, new, {})) == [f"{section} removed"]


def test_changed_code_is_named(opened, finish_all):
    finish_all(opened(code={"luffy.data.row_filters": "1", "luffy.types": "1"}))
    found = reasons(opened(code={"luffy.data.row_filters": "2", "luffy.types": "1"}))
    assert found["prepare_data"].startswith("code changed (luffy.data.row_filters) (against ")


def test_a_file_with_other_content_is_named_with_both_hashes(opened, finish_all, tmp_path):
    rows = tmp_path / "rows.jsonl"
    source = f"data.train={{kind: file, path: {rows}}}"
    rows.write_text('{"prompt": "1"}\n')
    before = opened(source)
    finish_all(before)
    rows.write_text('{"prompt": "2"}\n')
    after = opened(source)
    hashes = [one.identities["prepare_data"].files[f"{rows.name} (data.train)"][:8] for one in (before, after)]
    assert reasons(after)["prepare_data"].startswith(
        f"content of {rows.name} (data.train) {hashes[0]} -> {hashes[1]} (against "
    )


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_damaged_output_makes_its_stage_run_and_names_the_file(opened, finish_all, damage):
    experiment = opened()
    finish_all(experiment)
    file = experiment.plan_node("sft").directory / "metrics.jsonl"
    file.unlink() if damage == "missing" else file.write_text("{} ")
    assert reasons(experiment)["sft"] == f"metrics.jsonl is {damage}"
    assert decisions(experiment)["sft"] == "run"
    assert decisions(experiment)["base"] == decisions(experiment)["evaluate_base"] == "reused"
    assert decisions(experiment)["rl"] == "reused or run"
    assert reasons(experiment)["rl"] == "waits for sft"


def test_dependants_are_reused_when_the_result_comes_out_the_same(opened, finish_all, finish):
    experiment = opened()
    finish_all(experiment)
    shutil.rmtree(experiment.plan_node("sft").directory)
    finish(experiment, "sft", content="weights")
    assert set(decisions(experiment).values()) == {"reused"}
    shutil.rmtree(experiment.plan_node("sft").directory)
    finish(experiment, "sft", content="others!")
    assert decisions(experiment)["rl"] == decisions(experiment)["evaluate_sft"] == "run"
    assert reasons(experiment)["rl"] == "model came out differently"
    assert decisions(experiment)["evaluate_base"] == "reused"


def test_an_interrupted_stage_resumes_from_its_newest_complete_checkpoint(opened, finish, begin):
    experiment = opened()
    finish(experiment, "prepare_data")
    plan = experiment.plan_node("base")
    begin(plan, steps=20)
    (plan.directory / "checkpoints" / "step_000030").mkdir()
    assert decisions(experiment)["base"] == "resume from step 20"
    assert reasons(experiment)["base"] == "interrupted"


def test_a_damaged_export_is_made_again_from_the_newest_checkpoint(opened, finish_all):
    experiment = opened()
    finish_all(experiment, steps=20)
    (experiment.plan_node("sft").directory / "model" / "weights").unlink()
    assert decisions(experiment)["sft"] == "resume from step 20"
    (experiment.plan_node("sft").directory / "metrics.jsonl").unlink()
    assert decisions(experiment)["sft"] == "run"


def test_a_longer_run_continues_the_longest_shorter_one(opened, finish_all):
    for steps in (4, 6):
        finish_all(opened(f"rl.steps={steps}"), steps=steps)
    plan = opened("rl.steps=9").plan_node("rl")
    shorter = opened("rl.steps=6").plan_node("rl")
    assert plan.headline == f"continue {shorter.identity.key} from step 6"
    assert plan.reason == "rl.steps 6 -> 9"
    assert opened("rl.steps=5").plan_node("rl").step == 4
    finish_all(opened(COSINE), steps=3)
    assert opened(COSINE, "rl.steps=9").plan_node("rl").headline == "run", "its rate depends on the length"


def test_own_checkpoints_come_before_a_continuation(opened, finish_all, begin):
    finish_all(opened(), steps=6)
    longer = opened("rl.steps=9")
    begin(longer.plan_node("rl"), steps=8)
    assert longer.plan_node("rl").headline == "resume from step 8"


def test_verify_finds_a_change_that_hides_its_traces(opened, finish_all):
    experiment = opened()
    finish_all(experiment)
    file = experiment.plan_node("base").directory / "metrics.jsonl"
    stat = file.stat()
    file.write_text("[]\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert decisions(opened())["base"] == "reused"
    assert decisions(opened(verify=True))["base"] == "run"
