import pytest

from luffy.pipeline import reuse
from luffy.pipeline.manifest import consumed_digests
from luffy.pipeline.reuse import Condition, clear, examine


def look(plan):
    return examine(plan.directory, plan.identity.key, consumed_digests(plan.inputs))


def test_clearing_leaves_the_log_the_events_and_the_job(opened, finish):
    plan = finish(opened(), "prepare_data", steps=5)
    for name in ("log.txt", "events.jsonl", "config.yaml", ".lock"):
        (plan.directory / name).touch()
    (plan.directory / "metrics.jsonl").unlink()
    clear(plan.directory, look(plan))
    assert {path.name for path in plan.directory.iterdir()} == {"log.txt", "events.jsonl", "config.yaml", ".lock"}


def test_a_kill_while_a_stage_is_cleared_leaves_nothing_to_resume_from(opened, finish, begin, monkeypatch):
    experiment = opened()
    finish(experiment, "prepare_data", content="one")
    plan = experiment.plan_node("base")
    begin(plan)
    (plan.directory / "journal").mkdir()
    (plan.directory / "journal" / "step_000001").write_text("of the first inputs")
    finish(experiment, "prepare_data", content="two")
    with monkeypatch.context() as killed:
        killed.setattr(reuse.shutil, "rmtree", kill)
        with pytest.raises(KeyboardInterrupt):
            clear(plan.directory, look(plan))
    assert look(plan).stale == ("identity.json", "journal")
    clear(plan.directory, look(plan))
    assert list(plan.directory.iterdir()) == []


def kill(path, **options):
    raise KeyboardInterrupt


def test_a_damaged_export_leaves_what_training_wrote(opened, finish):
    plan = finish(opened(), "prepare_data", steps=5)
    (plan.directory / "model" / "weights").unlink()
    condition = look(plan)
    clear(plan.directory, condition)
    assert condition.step == 5
    assert {path.name for path in plan.directory.iterdir()} == {"identity.json", "metrics.jsonl", "checkpoints"}


def test_a_directory_that_is_not_a_stage_is_never_cleared(tmp_path):
    assert not examine(tmp_path / "none", "abc", {}).reusable
    (tmp_path / "thesis.tex").touch()
    condition = examine(tmp_path, "abc", {})
    clear(tmp_path, condition)
    assert not condition.reusable
    assert (tmp_path / "thesis.tex").exists()


def test_a_directory_with_a_different_key_is_not_reusable(opened, finish):
    plan = finish(opened(), "prepare_data", steps=5)
    condition = examine(plan.directory, "0123456789abcdef", {})
    assert (condition.reusable, condition.step) == (False, 0)
    assert condition.reason == f"the directory holds {plan.identity.key}"


def test_checkpoints_of_other_inputs_are_not_resumed(opened, finish, begin):
    experiment = opened()
    finish(experiment, "prepare_data", content="one")
    plan = experiment.plan_node("base")
    begin(plan, steps=5)
    assert look(plan).step == 5
    finish(experiment, "prepare_data", content="two")
    assert (look(plan).step, look(plan).reason) == (0, "data came out differently")


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
