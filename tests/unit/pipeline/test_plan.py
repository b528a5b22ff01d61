"""What will run, be resumed or reused, and why: after an edit, after damage, from other code."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support import stages
from support.refusals import refused
from synthetic.finished_stages import begin, finish, finish_all

from luffy.errors import WorkspaceError
from luffy.pipeline import reuse
from luffy.pipeline.events import EVENTS_FILE, INTERRUPTED, EventWriter
from luffy.pipeline.garbage import Retention, survey
from luffy.pipeline.identity import read_identity, write_identity
from luffy.pipeline.job import JOB_FILE, read_job
from luffy.pipeline.manifest import consumed_digests, read_manifest, write_manifest
from luffy.pipeline.reuse import clear, examine

COSINE, FASTER = "rl.optimizer.schedule.kind=cosine", "sft.optimizer.lr=2e-3"


def decisions(experiment):
    return {plan.node.name: plan.headline for plan in experiment.plan()}


def reasons(experiment):
    return {plan.node.name: plan.reason for plan in experiment.plan()}


def what_of(experiment, node):
    return decisions(experiment)[node], reasons(experiment)[node]


def folder(experiment, node):
    return experiment.plan_node(node).directory


def interrupt(*arguments, **options):
    raise KeyboardInterrupt


# ---- edits ----


def test_everything_runs_in_an_empty_workspace_and_is_reused_when_it_is_finished(opened):
    assert {*decisions(opened()).values(), *reasons(opened()).values()} == {"run", "first run"}
    finish_all(opened())
    os.utime(folder(opened(), "sft") / "model" / "weights", (1, 1))  # as in a copy
    assert set(decisions(opened()).values()) == {"reused"}
    file = folder(opened(), "base") / "metrics.jsonl"
    stat = file.stat()
    file.write_text("[]\n")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # a change that hides its traces
    assert decisions(opened())["base"] == "reused"
    assert decisions(opened(verify=True))["base"] == "run"


BEFORE_SFT = {"prepare_data", "base", "evaluate_base"}
EVALUATED = {"evaluate_base", "evaluate_sft"}
BEFORE_RL = BEFORE_SFT | {"sft", "evaluate_sft"}
SUITES = ["data.suites.longer=null", "data.suites.own={kind: arithmetic, num_prompts: 4, num_operations: [2]}"]
CORRECTED, CORRECTION = ["rl.correction={kind: truncate}"], "objective.terms.on_policy.correction"


CHANGES = [  # what is finished, what is wanted, the reason of a stage, and what is reused
    ([], [FASTER], "sft", "sft.optimizer.lr 0.001 -> 0.002", BEFORE_SFT),
    ([], [FASTER], "rl", "different result of sft ({} -> {})", BEFORE_SFT),
    ([], ["model.lora={rank: 4, alpha: 8}"], "sft", "lora added", BEFORE_SFT),
    ([], ["evaluation.confidence=0.9"], "evaluate_rl", "evaluation.confidence", BEFORE_RL - EVALUATED | {"rl"}),
    ([], SUITES, "prepare_data", "data.suites.own added, data.suites.longer removed", set()),
    # A section in place of null, and back again.
    ([], CORRECTED, "rl", f"{CORRECTION} added (against ", BEFORE_RL),
    (CORRECTED, [], "rl", f"{CORRECTION} removed (against ", BEFORE_RL),
]


@pytest.mark.parametrize(("before", "overrides", "stage", "reason", "reused"), CHANGES)
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
    def prepared(prompt, number):
        rows.write_text(f'{{"prompt": "{prompt}"}}\n')
        return opened(f"data.train={{kind: file, path: {rows}}}", code={"data": number, "*": "1"})

    rows = tmp_path / "rows.jsonl"
    before = prepared(1, "1")
    finish_all(before)
    assert reasons(prepared(1, "2"))["prepare_data"].startswith("code changed (data) (against ")
    after = prepared(2, "1")
    hashes = [one.identities["prepare_data"].files["rows.jsonl (data.train)"][:8] for one in (before, after)]
    content = f"content of rows.jsonl (data.train) {hashes[0]} -> {hashes[1]} (against "
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


def nothing(path):
    """A file that is gone."""


def loop(path):
    path.symlink_to(path.name)


DAMAGE = [
    ("metrics.jsonl", nothing, "run", "metrics.jsonl is missing"),
    ("metrics.jsonl", "{} ", "run", "metrics.jsonl is changed"),
    ("metrics.jsonl", loop, "run", "metrics.jsonl is missing"),
    ("manifest.json", "{", "run", "manifest.json is not readable"),
    ("model/weights", nothing, "resume from step 20", "model/weights is missing"),  # made again from the checkpoint
]


@pytest.mark.parametrize(("file", "content", "headline", "reason"), DAMAGE)
def test_damage_makes_its_stage_run_and_names_the_file(opened, file, content, headline, reason):
    experiment = opened()
    finish_all(experiment, steps=20)
    harmed = folder(experiment, "sft") / file
    if isinstance(content, str):
        harmed.write_text(content)
    else:
        harmed.unlink()
        content(harmed)
    assert what_of(experiment, "sft") == (headline, reason)
    assert what_of(experiment, "rl") == ("reused or run", "waits for sft")
    assert {decisions(experiment)[node] for node in ("base", "evaluate_base")} == {"reused"}


MISPLACED = {
    "a folder for the manifest": ("manifest.json", Path.mkdir, "manifest.json is not readable"),
    "a loop for the manifest": ("manifest.json", loop, "manifest.json is not readable"),
    "a folder for the identity": ("identity.json", Path.mkdir, "identity.json is not readable"),
    "a file for the stage": ("", Path.touch, "in the place of its folder"),
    "a loop for the stage": ("", loop, "in the place of its folder"),
}


@pytest.mark.parametrize(("name", "make", "reason"), MISPLACED.values(), ids=MISPLACED)
def test_what_is_no_result_in_the_place_of_one_is_a_miss_with_its_reason_and_at_worst_one_line(
    tmp_path, name, make, reason
):
    experiment = stages.opened(tmp_path, "smoke.yaml")
    directory = folder(experiment, "prepare_data")
    (directory if name else directory.parent).mkdir(parents=True)
    make(directory / name)
    plan = experiment.plan_node("prepare_data")
    assert plan.action == "run" and reason in plan.reason
    if name:
        stages.execute(experiment, "prepare_data")
        assert experiment.plan_node("prepare_data").action == "reuse"
    else:
        with refused(str(directory), "remove", error=WorkspaceError):
            stages.execute(experiment, "prepare_data")


def test_dependants_are_reused_when_the_result_comes_out_the_same(opened):
    experiment = opened()
    finish_all(experiment)
    shutil.rmtree(folder(experiment, "sft"))
    finish(experiment, "sft", content="weights")
    assert set(decisions(experiment).values()) == {"reused"}
    shutil.rmtree(folder(experiment, "sft"))
    finish(experiment, "sft", content="others!")
    assert what_of(experiment, "rl") == ("run", "model came out differently")
    found = decisions(experiment)
    assert (found["evaluate_sft"], found["evaluate_base"]) == ("run", "reused")


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
        assert what_of(experiment, "base") == ("resume from step 20", how)
    finish(experiment, "prepare_data", content="two")
    assert what_of(experiment, "base") == ("run", "data came out differently")


# ---- what is cleared before a stage runs ----

KEPT = {"log.txt", "events.jsonl", "config.yaml", ".lock"}


def look(plan):
    return examine(plan.directory, plan.identity.key, consumed_digests(plan.inputs))


@pytest.mark.parametrize(  # what training wrote is kept where only the export is damaged
    ("damaged", "step", "left"),
    [("metrics.jsonl", 0, set()), ("model/weights", 5, {"identity.json", "metrics.jsonl", "checkpoints"})],
)
def test_clearing_leaves_the_log_the_events_the_job_and_what_is_resumed(opened, damaged, step, left):
    plan = finish(opened(), "prepare_data", steps=5)
    for name in KEPT:
        (plan.directory / name).touch()
    (plan.directory / damaged).unlink()
    condition = look(plan)
    clear(plan.directory, condition)
    assert condition.step == step
    assert {path.name for path in plan.directory.iterdir()} == KEPT | left


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


def test_a_directory_that_is_not_the_stage_is_not_reusable_and_of_no_stage_only_cleared_of_killed_writes(
    opened, tmp_path
):
    plan = finish(opened(), "prepare_data", steps=5)
    condition = examine(plan.directory, "0123456789abcdef", {})
    assert (condition.reusable, condition.step) == (False, 0)
    assert condition.reason == f"the directory holds {plan.identity.key}"
    assert not examine(tmp_path / "none", "abc", {}).reusable
    left = ["model/.tmp9a70bR", "journal/.step_000003.parquet.vbgbxlwv", ".metrics.json.a96_o87r"]
    left += ["model/.trash-.tmp9a70bR", ".trash-shards/000000.json"]
    kept = ["model/model.safetensors", "model/.gitattributes", "checkpoints/step_000002/.tmp9a70bR", "thesis.tex"]
    folder = tmp_path / "mine"
    for name in (*left, *kept):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"half")
    condition = examine(folder, "abc", {})
    clear(folder, condition)
    assert not condition.reusable
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == set(kept)
    assert not (folder / ".trash-shards").exists()


# ---- a result that differs in its code alone is taken over, and one that differs in more is not ----

NEW, NEWER = {"module": "2"}, {"module": "3"}


@pytest.fixture
def old(opened):
    """Every stage, made by the code of `opened`."""
    experiment = opened()
    finish_all(experiment, steps=5)
    return experiment


def test_every_stage_of_a_chain_is_taken_over_and_says_from_where(opened, old):
    experiment = opened(code=NEW)
    assert [plan.reason for plan in experiment.plan(adopts=True) if plan.action == "adopt"] == [
        f"{old.identities[node.name].key}, made by other code" for node in experiment.nodes
    ]
    assert set(decisions(experiment).values()) == {"run"}, "a plan takes over nothing"
    for node in experiment.nodes:
        assert experiment.adopt(node.name) == old.identities[node.name].key
        one, other = folder(old, node.name), folder(experiment, node.name)
        before, after = read_manifest(one), read_manifest(other)
        assert (after.adopted, after.key) == (before.key, experiment.identities[node.name].key)
        assert (after.outputs, other.stat().st_mode) == (before.outputs, one.stat().st_mode)
        job = read_job(other / JOB_FILE)
        assert (job.key, job.inputs) == (after.key, experiment.job(experiment.plan_node(node.name)).inputs)
        linked = {path.suffix for path in other.rglob("*") if path.is_file() and path.stat().st_nlink > 1}
        assert linked <= {".safetensors", ".parquet", ".pt", ".zst"}, "what is linked is never changed in place"
    for each in (experiment, old):
        assert set(decisions(each).values()) == {"reused"}
    assert experiment.adopt("base") is None, "it is there already"


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


def test_neither_a_stage_that_has_begun_is_replaced_nor_a_report_adopted_that_lacks_a_page_of_this_code(opened, old):
    begun = opened(code=NEWER)
    begin(begun.plan_node("prepare_data"), steps=2)
    assert (begun.adopt("prepare_data"), begun.plan_node("prepare_data").step) == (None, 2)
    manifest = read_manifest(folder(old, "report"))
    fewer = tuple(output for output in manifest.outputs if output.path != "report.html")
    write_manifest(folder(old, "report"), manifest.model_copy(update={"outputs": fewer}))
    # A setting that the older code did not have is as its null.
    known = read_identity(folder(old, "prepare_data"))
    fewer = {name: value for name, value in known.identity.settings.items() if value is not None}
    assert fewer != known.identity.settings
    record = replace(known, identity=replace(known.identity, settings=fewer))
    write_identity(folder(old, "prepare_data"), record)
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
    again = opened(code=NEWER)
    for one in (old, experiment, changed):
        (folder(one, "prepare_data") / "model" / "weights").write_text("damaged")
    assert again.adopt("prepare_data") is None
