import pytest

from luffy.errors import ConfigError
from luffy.pipeline.chain.job import read_job, write_job


@pytest.mark.parametrize("index", range(9))
def test_a_job_is_read_from_yaml_as_written(opened, tmp_path, index):
    experiment = opened("data.train.stepwise_share={2: 0.5, 3: 1.0}", "sft.optimizer.lr=1e-5", "difficulty={}")
    job = experiment.job(experiment.plan()[index])
    write_job(tmp_path / "config.yaml", job)
    assert read_job(tmp_path / "config.yaml") == job
    assert read_job(tmp_path / "config.yaml").identity.key == job.key


@pytest.mark.parametrize(
    "digest", ["099071447312e206", "0990714473120206", "1e4", "1.5", "0x1f", "0o17", "1_0", "null"]
)
def test_a_hash_that_looks_like_a_number_stays_text(opened, tmp_path, digest):
    experiment = opened()
    job = experiment.job(experiment.plan()[3])
    job = job.model_copy(update={"code": {"luffy": digest}})
    write_job(tmp_path / "config.yaml", job)
    assert read_job(tmp_path / "config.yaml").code == {"luffy": digest}


def test_a_mistake_in_a_job_names_the_field(opened, tmp_path):
    experiment = opened()
    write_job(tmp_path / "config.yaml", experiment.job(experiment.plan()[3]))
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("prompts_per_step: 4", "prompts_per_stop: 4"))
    with pytest.raises(ConfigError, match="prompts_per_stop: unknown key"):
        read_job(tmp_path / "config.yaml")


def test_settings_of_another_stage_are_refused(opened, tmp_path):
    experiment = opened()
    write_job(tmp_path / "config.yaml", experiment.job(experiment.plan()[3]))
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("stage: rl", "stage: sft"))
    with pytest.raises(ConfigError):
        read_job(tmp_path / "config.yaml")
