import pytest

from luffy.errors import LuffyError
from luffy.pipeline.manifest import collect_outputs, consumed_digest, finished_manifest, read_manifest


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
