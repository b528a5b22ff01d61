"""Workspaces that share finished stages by `execution.shared_cache`."""

import logging

import pytest
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.finished_stages import finish, finish_all

from luffy.config import load_experiment
from luffy.pipeline.experiment import ExperimentRun, StageObserver, open_experiment
from luffy.pipeline.garbage import Retention, survey
from luffy.pipeline.manifest import finished_manifest
from luffy.pipeline.records import list_records
from luffy.pipeline.workspace import Workspace


def opened_with(url, workspace, *overrides, code="1"):
    config = load_experiment(CONFIGS / "smoke.yaml", (f"execution.shared_cache={url}", *overrides))
    return open_experiment(config, Workspace(workspace), code=lambda kind, rooms: {"module": code})


@pytest.fixture(params=["folder", "memory"])
def lab(request, tmp_path):
    """Opens the experiment in a workspace of the lab, all of which share one cache."""
    url = str(tmp_path / "lab") if request.param == "folder" else f"memory://lab/{tmp_path.name}"
    return lambda name, *overrides, **code: opened_with(url, tmp_path / name, *overrides, **code)


@pytest.fixture
def made(lab):
    """The experiment that has finished and copied every stage."""
    experiment = lab("first")
    finish_all(experiment, steps=5)
    assert run_all(experiment) == ["reused"] * len(experiment.nodes)
    return experiment


def run_all(experiment) -> list[str]:
    """Run the stages in their order, none of which may be made; how each was come by."""
    shown: list[str] = []

    def must_not_start(*arguments: object) -> list[str]:
        raise AssertionError(f"a stage would be made: {arguments}")

    class Observer(StageObserver):
        def planned(self, plan):
            shown.append(plan.headline)

    experiment.workspace.prepare()
    run = ExperimentRun(experiment, experiment.workspace.new_run("it", {}), must_not_start)
    for node in experiment.nodes:
        run.execute(node.name, Observer())
    return shown


def actions(experiment):
    return {plan.node.name: plan.action for plan in experiment.plan()}


def test_another_workspace_pulls_every_stage_with_its_bytes(lab, made):
    second = lab("second")
    assert [plan.headline for plan in second.plan()] == ["pulled"] * len(second.nodes)
    assert run_all(second) == ["pulled"] * len(second.nodes)
    for node in second.nodes:
        here, there = second.plan_node(node.name), made.plan_node(node.name)
        assert here.action == "reuse"
        assert finished_manifest(here.directory).digest == finished_manifest(there.directory).digest
        assert not finished_manifest(here.directory).damaged(here.directory, verify=True)
        assert not (here.directory / "checkpoints").exists()
    assert not survey(second.workspace, Retention()).garbage
    assert run_all(second) == ["reused"] * len(second.nodes)


def test_results_of_other_settings_code_or_inputs_are_not_taken(lab, made):
    changed = actions(lab("second", "base.steps=21"))
    assert (changed["prepare_data"], changed["base"]) == ("pull", "run")
    assert {*actions(lab("second", code="2")).values()} == {"run"}
    other = lab("third")
    finish(other, "prepare_data", content="other data")
    assert other.plan_node("base").action == "run"


def test_a_damaged_file_is_named_and_the_stage_made_here(lab, made, caplog):
    second = lab("second")
    cache = second.shared
    manifest = cache.find("prepare_data", second.identities["prepare_data"].key)
    place = f"{cache._folder(manifest)}/{manifest.outputs[0].path}"
    cache.files.pipe_file(place, b"damaged")
    with caplog.at_level(logging.WARNING), pytest.raises(AssertionError, match="a stage would be made"):
        run_all(second)
    assert f"{place} is damaged" in caplog.text
    assert [path.name for path in second.workspace.stages.glob("*/.trash-*")] == []


def test_a_stage_that_cannot_be_pulled_continues_a_shorter_run_that_is_here(lab, made):
    second = lab("second")
    finish_all(lab("second", "rl.steps=1"), steps=1)
    manifest = second.shared.find("rl", second.identities["rl"].key)
    second.shared.files.pipe_file(f"{second.shared._folder(manifest)}/model/weights", b"damaged")
    assert second.plan_node("rl").action == "pull"
    with pytest.raises(AssertionError, match="a stage would be made"):
        run_all(second)
    (record,) = list_records(second.workspace)
    stage = record.stages["rl"]
    assert stage.action.startswith("continue ") and stage.reason.startswith("could not be pulled; rl.steps 1 -> ")


@pytest.mark.parametrize("path", ["../../outside", "/tmp/outside-of-the-stage"])
def test_a_manifest_that_leads_out_of_the_stage_is_refused(lab, made, path, caplog):
    second = lab("second")
    key = second.identities["prepare_data"].key
    manifest = second.shared.find("prepare_data", key)
    outputs = (manifest.outputs[0].model_copy(update={"path": path}),)
    text = manifest.model_copy(update={"outputs": outputs}).model_dump_json().encode()
    second.shared.files.pipe_file(f"{second.shared.root}/prepare_data/{key}/manifest.json", text)
    with pytest.raises(AssertionError, match="a stage would be made"):
        run_all(second)
    assert "outside of the stage" in caplog.text


def test_half_a_copy_counts_for_nothing_and_the_next_run_completes_it(lab, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    first = lab("first")
    finish_all(first, steps=5)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(first.shared.files), "pipe_file", interrupt)
        run_all(first)
    assert {*actions(lab("second")).values()} == {"run"}
    run_all(first)
    assert {*actions(lab("second")).values()} == {"pull"}


def test_a_cache_that_fails_is_one_warning_and_the_run_goes_on(lab, made, monkeypatch, caplog):
    def fail(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(type(made.shared.files), "cat_file", fail)
    assert {*actions(lab("second")).values()} == {"run"}
    assert [record.message.rpartition(" (")[2] for record in caplog.records] == ["TimeoutError)"]


def test_an_unusable_url_is_refused(tmp_path):
    for url, named in (("nosuch://lab", "nosuch"), ("s3://key:secret@bucket/lab", "must name no user or key")):
        with refused(named):
            opened_with(url, tmp_path)
