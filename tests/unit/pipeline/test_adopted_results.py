"""A result that differs from the wanted one in its code alone is taken over, and one that differs in more is not."""

from dataclasses import replace

import pytest

from luffy.pipeline import reuse
from luffy.pipeline.garbage import Retention, survey
from luffy.pipeline.identity import read_identity, write_identity
from luffy.pipeline.job import JOB_FILE, read_job
from luffy.pipeline.manifest import read_manifest, write_manifest

NEW = {"module": "2"}


@pytest.fixture
def old(opened, finish_all):
    """Every stage, made by the code of `opened`."""
    experiment = opened()
    finish_all(experiment, steps=5)
    return experiment


def test_every_stage_of_a_chain_is_taken_over_and_says_from_where(opened, old):
    experiment = opened(code=NEW)
    assert {plan.action for plan in experiment.plan()} == {"run"}
    for node in experiment.nodes:
        assert experiment.adopt(node.name) == old.identities[node.name].key
        before = read_manifest(old.plan_node(node.name).directory)
        after = read_manifest(experiment.plan_node(node.name).directory)
        assert (after.adopted, after.key) == (before.key, experiment.identities[node.name].key)
        assert after.outputs == before.outputs
        modes = {one.plan_node(node.name).directory.stat().st_mode for one in (old, experiment)}
        assert len(modes) == 1
        job = read_job(experiment.plan_node(node.name).directory / JOB_FILE)
        assert (job.key, job.inputs) == (after.key, experiment.job(experiment.plan_node(node.name)).inputs)
    assert {plan.action for plan in experiment.plan()} == {"reuse"}
    assert {plan.action for plan in old.plan()} == {"reuse"}
    assert experiment.adopt("base") is None, "it is there already"


def test_a_setting_that_the_older_code_did_not_have_is_as_its_null(opened, old):
    directory = old.plan_node("prepare_data").directory
    known = read_identity(directory)
    fewer = {name: value for name, value in known.identity.settings.items() if value is not None}
    assert fewer != known.identity.settings
    write_identity(directory, replace(known, identity=replace(known.identity, settings=fewer)))
    assert opened(code=NEW).adopt("prepare_data") == old.identities["prepare_data"].key


@pytest.mark.parametrize("call", ["write_identity", "write_manifest"])
def test_a_kill_in_the_middle_leaves_nothing_that_counts_and_the_next_run_adopts(opened, old, monkeypatch, call):
    experiment, kill = opened(code=NEW), KeyboardInterrupt
    monkeypatch.setattr(reuse, call, lambda *arguments: (_ for _ in ()).throw(kill))
    with pytest.raises(kill):
        experiment.adopt("prepare_data")
    monkeypatch.undo()
    assert not experiment.plan_node("prepare_data").directory.exists()
    assert len(list(experiment.workspace.siblings("prepare_data"))) == 1
    assert experiment.adopt("prepare_data") == old.identities["prepare_data"].key
    left = survey(experiment.workspace, Retention()).garbage
    assert "an interrupted deletion" in {item.reason for item in left}, "what the kill has left is garbage"


def test_a_report_that_lacks_a_page_of_this_code_is_made_again(opened, old):
    directory = old.plan_node("report").directory
    manifest = read_manifest(directory)
    fewer = tuple(output for output in manifest.outputs if output.path != "report.md")
    write_manifest(directory, manifest.model_copy(update={"outputs": fewer}))
    experiment = opened(code=NEW)
    adopted = {node.name: experiment.adopt(node.name) for node in experiment.nodes}
    assert [name for name, key in adopted.items() if key is None] == ["report"]


def test_a_stage_that_has_begun_is_not_replaced(opened, old, begin):
    experiment = opened(code=NEW)
    begin(experiment.plan_node("prepare_data"), steps=2)
    assert experiment.adopt("prepare_data") is None
    assert experiment.plan_node("prepare_data").step == 2


def test_what_is_linked_is_never_changed_in_place(opened, old):
    experiment = opened(code=NEW)
    for node in experiment.nodes:
        experiment.adopt(node.name)
    for plan in experiment.plan():
        for path in plan.directory.rglob("*"):
            if path.is_file() and path.stat().st_nlink > 1:
                assert path.suffix in (".safetensors", ".parquet", ".pt", ".zst")


def test_other_settings_inputs_or_damage_keep_a_result_from_it(opened, old, finish):
    changed = opened("base.steps=21", code=NEW)
    changed.adopt("prepare_data")
    assert changed.adopt("base") is None
    experiment = opened(code=NEW)
    finish(experiment, "prepare_data", content="other data")
    assert experiment.adopt("base") is None
    again = opened(code={"module": "3"})
    for one in (old, experiment, changed):
        (one.plan_node("prepare_data").directory / "model" / "weights").write_text("damaged")
    assert again.adopt("prepare_data") is None
