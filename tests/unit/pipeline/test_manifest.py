import subprocess

import pytest

from luffy.errors import LuffyError
from luffy.pipeline.manifest import (
    collect_outputs,
    consumed_digest,
    finished_manifest,
    read_manifest,
    uncommitted_changes,
)


@pytest.fixture
def done(opened, finish):
    return finish(opened(), "prepare_data")


def test_folders_are_expanded_and_hashed(done):
    manifest = read_manifest(done.directory)
    assert [output.path for output in manifest.outputs] == ["metrics.jsonl", "model/weights"]
    assert all(len(output.sha256) == 64 for output in manifest.outputs)


def test_a_missing_output_is_refused(tmp_path):
    with pytest.raises(LuffyError, match="model: the stage lists it"):
        collect_outputs(tmp_path, ("model",))


def test_only_the_folder_of_a_model_is_consumed(opened, finish):
    experiment = opened()
    before = read_manifest(finish(experiment, "prepare_data").directory)
    after = before.model_copy(update={"outputs": before.outputs[1:]})
    assert consumed_digest("model", before) == consumed_digest("model", after)
    assert consumed_digest("data", before) != consumed_digest("data", after)


def test_an_unreadable_manifest_is_none(done):
    (done.directory / "manifest.json").write_text("{")
    assert read_manifest(done.directory) is None
    with pytest.raises(LuffyError, match="not a finished stage"):
        finished_manifest(done.directory)


def test_what_was_not_committed_can_be_restored(tmp_path, monkeypatch):
    repository = tmp_path / "mine"
    (repository / "workspace").mkdir(parents=True)
    monkeypatch.chdir(repository)

    def git(*arguments: str) -> None:
        own = ("-c", "user.name=A", "-c", "user.email=a@b.c")
        subprocess.run(["git", *own, *arguments], cwd=repository, check=True, capture_output=True)

    (repository / "losses.py").write_text("FACTOR = 1\n")
    assert "mine" not in uncommitted_changes(repository / "workspace")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (repository / "losses.py").write_text("FACTOR = 2\n")
    (repository / "new.py").write_text("x = 'ä'\n")
    (repository / "rows.parquet").write_bytes(b"\0" * 100)
    (repository / "workspace" / "job.yaml").write_text("a: 1\n")
    patch = uncommitted_changes(repository / "workspace")["mine"]
    (tmp_path / "patch").write_bytes(patch)
    git("reset", "-q", "--hard")
    (repository / "new.py").unlink()
    git("apply", str(tmp_path / "patch"))
    assert (repository / "losses.py").read_text() == "FACTOR = 2\n"
    assert (repository / "new.py").read_text() == "x = 'ä'\n"
    assert b"job.yaml" not in patch and b"rows.parquet" not in patch
    git("add", ".")
    git("commit", "-qm", "second")
    assert "mine" not in uncommitted_changes(repository / "workspace")
