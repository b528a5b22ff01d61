"""What will run, be resumed or reused, and why: after an edit, after damage, from other code."""

import os
import shutil
from dataclasses import replace
from functools import partial

import pytest
from synthetic.finished_stages import begin, finish, finish_all

from luffy.pipeline import reuse
from luffy.pipeline.events import EVENTS_FILE, INTERRUPTED, EventWriter
from luffy.pipeline.garbage import Retention, survey
from luffy.pipeline.identity import read_identity, write_identity
from luffy.pipeline.job import JOB_FILE, read_job
from luffy.pipeline.manifest import consumed_digests, read_manifest, write_manifest
from luffy.pipeline.reuse import Condition, clear, examine

COSINE = "rl.optimizer.schedule.kind=cosine"
FASTER = "sft.optimizer.lr=2e-3"
LOADS, OTHER = {"luffy.data.row_filters": "1", "luffy.types": "1"}, {"luffy.data.row_filters": "2", "luffy.types": "1"}


def decisions(experiment):
    return {plan.node.name: plan.headline for plan in experiment.plan()}


def reasons(experiment):
    return {plan.node.name: plan.reason for plan in experiment.plan()}


def folder(experiment, node):
    return experiment.plan_node(node).directory


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


# ---- edits ----


def test_everything_runs_in_an_empty_workspace_and_is_reused_when_it_is_finished(opened):
    assert set(decisions(opened()).values()) == {"run"}
    assert set(reasons(opened()).values()) == {"first run"}
    finish_all(opened())
    os.utime(folder(opened(), "sft") / "model" / "weights", (1, 1))  # as in a copy
    assert set(decisions(opened()).values()) == {"reused"}


BEFORE_SFT = {"prepare_data", "base", "evaluate_base"}
BEFORE_RL = BEFORE_SFT | {"sft", "evaluate_sft"}
SUITES = ["data.suites.longer=null", "data.suites.own={kind: arithmetic, num_prompts: 4, num_operations: [2]}"]
CORRECTED, CORRECTION = ["rl.correction={kind: truncate}"], "objective.terms.on_policy.correction"


@pytest.mark.parametrize(
    ("before", "overrides", "stage", "reason", "reused"),
    [
        ([], [FASTER], "sft", "sft.optimizer.lr 0.001 -> 0.002", BEFORE_SFT),
        ([], [FASTER], "rl", "different result of sft ({} -> {})", BEFORE_SFT),
        ([], ["model.lora={rank: 4, alpha: 8}"], "sft", "lora added", BEFORE_SFT),
        (
            [],
            ["evaluation.confidence=0.9"],
            "evaluate_rl",
            "evaluation.confidence",
            {"prepare_data", "base", "sft", "rl"},
        ),
        ([], SUITES, "prepare_data", "data.suites.own added, data.suites.longer removed", set()),
        # A section in place of null, and back again.
        ([], CORRECTED, "rl", f"{CORRECTION} added (against ", BEFORE_RL),
        (CORRECTED, [], "rl", f"{CORRECTION} removed (against ", BEFORE_RL),
    ],
)
def test_a_change_is_named_and_leaves_what_does_not_depend_on_it(opened, before, overrides, stage, reason, reused):
    finish_all(opened(*before))
    after = opened(*overrides)
    keys = [one.identities["sft"].key for one in (opened(*before), after)]
    assert reasons(after)[stage].startswith(reason.format(*keys)) and " (against " in reasons(after)[stage]
    assert {name for name, decision in decisions(after).items() if decision == "reused"} == reused


def test_the_most_similar_result_of_the_experiment_explains_and_ties_go_to_the_newest(opened):
    finish_all(opened())
    finish_all(opened(FASTER, "sft.epochs=9"))
    assert reasons(opened("sft.epochs=8"))["sft"].startswith("sft.epochs 2 -> 8 (against ")
    assert reasons(opened(FASTER))["sft"].startswith("sft.epochs 9 -> 2 (against ")
    other = opened("name=other", FASTER)
    assert {reasons(other)["sft"], reasons(other)["rl"]} == {"first run"}
    assert decisions(other)["base"] == "reused"


def test_changed_code_and_files_with_other_content_are_named(opened, tmp_path):
    rows = tmp_path / "rows.jsonl"
    source = f"data.train={{kind: file, path: {rows}}}"
    rows.write_text('{"prompt": "1"}\n')
    before = opened(source, code=LOADS)
    finish_all(before)
    recoded = reasons(opened(source, code=OTHER))["prepare_data"]
    assert recoded.startswith("code changed (luffy.data.row_filters) (against ")
    rows.write_text('{"prompt": "2"}\n')
    after = opened(source, code=LOADS)
    hashes = [one.identities["prepare_data"].files[f"{rows.name} (data.train)"][:8] for one in (before, after)]
    content = f"content of {rows.name} (data.train) {hashes[0]} -> {hashes[1]} (against "
    assert reasons(after)["prepare_data"].startswith(content)


def test_a_longer_run_continues_the_longest_shorter_one_unless_it_has_checkpoints_of_its_own(opened):
    for steps in (4, 6):
        finish_all(opened(f"rl.steps={steps}"), steps=steps)
    longer = opened("rl.steps=9")
    plan, shorter = longer.plan_node("rl"), opened("rl.steps=6").plan_node("rl")
    assert plan.headline == f"continue {shorter.identity.key} from step 6"
    assert plan.reason == "rl.steps 6 -> 9"
    assert opened("rl.steps=5").plan_node("rl").step == 4
    finish_all(opened(COSINE), steps=3)
    assert opened(COSINE, "rl.steps=9").plan_node("rl").headline == "run", "its rate depends on the length"
    begin(plan, steps=8)
    assert longer.plan_node("rl").headline == "resume from step 8"


# ---- damage ----


@pytest.mark.parametrize(
    ("file", "content", "headline", "reason"),
    [
        ("metrics.jsonl", None, "run", "metrics.jsonl is missing"),
        ("metrics.jsonl", "{} ", "run", "metrics.jsonl is changed"),
        ("manifest.json", "{", "run", "manifest.json is not readable"),
        ("model/weights", None, "resume from step 20", "model/weights is missing"),  # made again from the checkpoint
    ],
)
def test_damage_makes_its_stage_run_and_names_the_file(opened, file, content, headline, reason):
    experiment = opened()
    finish_all(experiment, steps=20)
    harmed = folder(experiment, "sft") / file
    harmed.unlink() if content is None else harmed.write_text(content)
    found = decisions(experiment)
    assert (found["sft"], reasons(experiment)["sft"]) == (headline, reason)
    assert found["base"] == found["evaluate_base"] == "reused"
    assert (found["rl"], reasons(experiment)["rl"]) == ("reused or run", "waits for sft")


def test_verify_finds_a_change_that_hides_its_traces(opened):
    finish_all(opened())
    file = folder(opened(), "base") / "metrics.jsonl"
    stat = file.stat()
    file.write_text("[]\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert decisions(opened())["base"] == "reused"
    assert decisions(opened(verify=True))["base"] == "run"


def test_dependants_are_reused_when_the_result_comes_out_the_same(opened):
    experiment = opened()
    finish_all(experiment)
    shutil.rmtree(folder(experiment, "sft"))
    finish(experiment, "sft", content="weights")
    assert set(decisions(experiment).values()) == {"reused"}
    shutil.rmtree(folder(experiment, "sft"))
    finish(experiment, "sft", content="others!")
    found = decisions(experiment)
    assert found["rl"] == found["evaluate_sft"] == "run" and found["evaluate_base"] == "reused"
    assert reasons(experiment)["rl"] == "model came out differently"


def test_an_interrupted_stage_resumes_from_its_newest_complete_checkpoint_of_the_same_inputs(opened):
    experiment = opened()
    finish(experiment, "prepare_data", content="one")
    plan = experiment.plan_node("base")
    begin(plan, steps=20)
    (plan.directory / "checkpoints" / "step_000030").mkdir()
    events = EventWriter(plan.directory / EVENTS_FILE)
    for tell, how in (
        (events.started, "killed"),
        (partial(events.tell, "stopped", "was asked to end"), "interrupted"),
        (events.started, "killed"),
        (partial(events.tell, "failed", INTERRUPTED), "interrupted"),
        (partial(events.tell, "failed", "sft.lr: the loss is NaN"), "failed"),
    ):
        tell()
        assert (decisions(experiment)["base"], reasons(experiment)["base"]) == ("resume from step 20", how)
    finish(experiment, "prepare_data", content="two")
    assert (decisions(experiment)["base"], reasons(experiment)["base"]) == ("run", "data came out differently")


# ---- what is cleared before a stage runs ----

KEPT = {"log.txt", "events.jsonl", "config.yaml", ".lock"}


def look(plan):
    return examine(plan.directory, plan.identity.key, consumed_digests(plan.inputs))


@pytest.mark.parametrize(
    ("damaged", "step", "left"),
    [
        ("metrics.jsonl", 0, KEPT),
        ("model/weights", 5, KEPT | {"identity.json", "metrics.jsonl", "checkpoints"}),  # what training wrote
    ],
)
def test_clearing_leaves_the_log_the_events_the_job_and_what_is_resumed(opened, damaged, step, left):
    plan = finish(opened(), "prepare_data", steps=5)
    for name in KEPT:
        (plan.directory / name).touch()
    (plan.directory / damaged).unlink()
    condition = look(plan)
    clear(plan.directory, condition)
    assert condition.step == step
    assert {path.name for path in plan.directory.iterdir()} == left


def test_a_kill_while_a_stage_is_cleared_leaves_nothing_to_resume_from(opened, monkeypatch):
    experiment = opened()
    finish(experiment, "prepare_data", content="one")
    plan = experiment.plan_node("base")
    begin(plan)
    (plan.directory / "journal").mkdir()
    (plan.directory / "journal" / "step_000001").write_text("of the first inputs")
    finish(experiment, "prepare_data", content="two")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(reuse.shutil, "rmtree", interrupt)
        clear(plan.directory, look(plan))
    assert look(plan).stale == ("identity.json", "journal")
    clear(plan.directory, look(plan))
    assert list(plan.directory.iterdir()) == []


def test_a_directory_that_is_not_the_stage_is_not_reusable_and_of_no_stage_never_cleared(opened, tmp_path):
    plan = finish(opened(), "prepare_data", steps=5)
    condition = examine(plan.directory, "0123456789abcdef", {})
    assert (condition.reusable, condition.step) == (False, 0)
    assert condition.reason == f"the directory holds {plan.identity.key}"
    assert not examine(tmp_path / "none", "abc", {}).reusable
    (tmp_path / "thesis.tex").touch()
    condition = examine(tmp_path, "abc", {})
    clear(tmp_path, condition)
    assert not condition.reusable
    assert (tmp_path / "thesis.tex").exists()


def test_what_a_killed_write_left_does_not_become_part_of_the_result(tmp_path):
    left = ["model/.tmp9a70bR", "journal/.step_000003.parquet.vbgbxlwv", ".metrics.json.a96_o87r"]
    left += ["model/.trash-.tmp9a70bR", ".trash-shards/000000.json"]
    kept = ["model/model.safetensors", "model/.gitattributes", "checkpoints/step_000002/.tmp9a70bR", "journal/a.bin"]
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    clear(tmp_path, Condition(False))
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(kept)
    assert not (tmp_path / ".trash-shards").exists()


# ---- a result that differs in its code alone is taken over, and one that differs in more is not ----

NEW = {"module": "2"}


@pytest.fixture
def old(opened):
    """Every stage, made by the code of `opened`."""
    experiment = opened()
    finish_all(experiment, steps=5)
    return experiment


def test_every_stage_of_a_chain_is_taken_over_and_says_from_where(opened, old):
    experiment = opened(code=NEW)
    assert set(decisions(experiment).values()) == {"run"}
    assert [plan.reason for plan in experiment.plan(adopts=True) if plan.action == "adopt"] == [
        f"{old.identities[node.name].key}, made by other code" for node in experiment.nodes
    ]
    assert set(decisions(experiment).values()) == {"run"}, "a plan takes over nothing"
    for node in experiment.nodes:
        assert experiment.adopt(node.name) == old.identities[node.name].key
        before, after = read_manifest(folder(old, node.name)), read_manifest(folder(experiment, node.name))
        assert (after.adopted, after.key) == (before.key, experiment.identities[node.name].key)
        assert after.outputs == before.outputs
        assert folder(old, node.name).stat().st_mode == folder(experiment, node.name).stat().st_mode
        job = read_job(folder(experiment, node.name) / JOB_FILE)
        assert (job.key, job.inputs) == (after.key, experiment.job(experiment.plan_node(node.name)).inputs)
        linked = [path for path in folder(experiment, node.name).rglob("*") if path.is_file()]
        # What is linked is never changed in place.
        assert {path.suffix for path in linked if path.stat().st_nlink > 1} <= {
            ".safetensors", ".parquet", ".pt", ".zst"
        }  # fmt: skip
    for each in (experiment, old):
        assert set(decisions(each).values()) == {"reused"}
    assert experiment.adopt("base") is None, "it is there already"


def test_a_setting_that_the_older_code_did_not_have_is_as_its_null(opened, old):
    directory = folder(old, "prepare_data")
    known = read_identity(directory)
    fewer = {name: value for name, value in known.identity.settings.items() if value is not None}
    assert fewer != known.identity.settings
    write_identity(directory, replace(known, identity=replace(known.identity, settings=fewer)))
    assert opened(code=NEW).adopt("prepare_data") == old.identities["prepare_data"].key


@pytest.mark.parametrize("call", ["write_identity", "write_manifest"])
def test_a_kill_in_the_middle_leaves_nothing_that_counts_and_the_next_run_adopts(opened, old, monkeypatch, call):
    experiment = opened(code=NEW)
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(reuse, call, interrupt)
        experiment.adopt("prepare_data")
    assert not folder(experiment, "prepare_data").exists()
    assert len(list(experiment.workspace.siblings("prepare_data"))) == 1
    assert experiment.adopt("prepare_data") == old.identities["prepare_data"].key
    left = survey(experiment.workspace, Retention()).garbage
    assert "an interrupted deletion" in {item.reason for item in left}, "what the kill has left is garbage"


def test_a_stage_that_has_begun_is_not_replaced_nor_a_report_adopted_that_lacks_a_page_of_this_code(opened, old):
    begun = opened(code={"module": "3"})
    begin(begun.plan_node("prepare_data"), steps=2)
    assert (begun.adopt("prepare_data"), begun.plan_node("prepare_data").step) == (None, 2)
    manifest = read_manifest(folder(old, "report"))
    fewer = tuple(output for output in manifest.outputs if output.path != "report.html")
    write_manifest(folder(old, "report"), manifest.model_copy(update={"outputs": fewer}))
    experiment = opened(code=NEW)
    assert [node.name for node in experiment.nodes if experiment.adopt(node.name) is None] == ["report"]


def test_other_settings_inputs_or_damage_keep_a_result_from_it(opened, old):
    changed = opened("base.steps=21", code=NEW)
    assert [plan.action for plan in changed.plan(adopts=True)][:3] == ["adopt", "run", "run"]
    changed.adopt("prepare_data")
    assert changed.adopt("base") is None
    experiment = opened(code=NEW)
    finish(experiment, "prepare_data", content="other data")
    assert experiment.adopt("base") is None
    again = opened(code={"module": "3"})
    for one in (old, experiment, changed):
        (folder(one, "prepare_data") / "model" / "weights").write_text("damaged")
    assert again.adopt("prepare_data") is None
