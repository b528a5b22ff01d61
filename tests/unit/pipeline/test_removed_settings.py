"""Files of earlier versions are read although they name settings that are gone."""

import json

import pytest
from support.stages import CONFIGS
from synthetic.finished_stages import finish

from luffy.config import load_experiment
from luffy.config.removed import REMOVED
from luffy.errors import ConfigError
from luffy.pipeline.job import JOB_FILE, read_job, write_job
from luffy.pipeline.manifest import MANIFEST_FILE, read_manifest
from luffy.pipeline.records import RunRecord

EXECUTION = {name: REMOVED[name] for name in ("attention", "offload_parameters", "sequence_parallel")}


@pytest.mark.parametrize("value", ["default", "other"])
@pytest.mark.parametrize("name", EXECUTION)
def test_records_of_what_is_finished_are_read_whatever_they_say_of_it(name, value, opened, tmp_path):
    said = {name: EXECUTION[name].default if value == "default" else "other"}
    experiment = opened()
    finish(experiment, "prepare_data")
    directory = experiment.plan()[0].directory
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    expected = read_manifest(directory)
    manifest["execution"] |= said
    manifest["execution"]["ray"]["weight_transfer"] = "broadcast"
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
    assert read_manifest(directory) == expected is not None
    config = load_experiment(CONFIGS / "smoke.yaml")
    values = config.model_dump(mode="json")
    values["execution"] |= said
    assert RunRecord(tmp_path, "finished", config=values).configuration == config


@pytest.mark.parametrize("name", EXECUTION)
def test_a_stage_that_is_not_finished_is_read_if_it_made_no_use_of_it(name, opened, tmp_path):
    experiment = opened()
    job = experiment.job(experiment.plan()[0])
    write_job(tmp_path / JOB_FILE, job)
    text = (tmp_path / JOB_FILE).read_text()
    for value, is_read in ((json.dumps(EXECUTION[name].default), True), ("other", False)):
        (tmp_path / JOB_FILE).write_text(text.replace("execution:\n", f"execution:\n  {name}: {value}\n"))
        if is_read:
            assert read_job(tmp_path / JOB_FILE) == job
        else:
            with pytest.raises(ConfigError, match=f"execution.{name}: is gone; "):
                read_job(tmp_path / JOB_FILE)
