import shutil

import pytest

from luffy.errors import ConfigError
from luffy.pipeline.job import inputs_of, read_job, write_job


def test_a_job_is_read_from_yaml_as_written(opened, tmp_path):
    experiment = opened("data.train.stepwise_share={2: 0.5, 3: 1.0}", "sft.optimizer.lr=1e-5", "difficulty={}")
    for plan in experiment.plan():
        job = experiment.job(plan)
        write_job(tmp_path / "config.yaml", job)
        assert read_job(tmp_path / "config.yaml") == job
        assert read_job(tmp_path / "config.yaml").identity.key == job.key


@pytest.mark.parametrize(
    ("overrides", "sft", "rl"),
    [
        (("sft.epochs=null", "sft.steps=3"), False, False),
        (("sft.epochs=null", "sft.steps=200", "rl.steps=200"), None, None),
        (("rl.steps=1", "rl.prompts_per_step=20000"), None, None),
        (("execution.compile=true",), True, True),
    ],
)
def test_layers_are_compiled_by_themselves_in_stages_that_repay_it(opened, overrides, sft, rl):
    experiment = opened("execution.micro_batch_tokens=256", *overrides)
    found = {plan.node.stage: experiment.job(plan).execution.compile for plan in experiment.plan()}
    assert (found["sft"], found["rl"]) == (sft, rl)


@pytest.mark.parametrize(
    "digest", ["099071447312e206", "0990714473120206", "1e4", "1.5", "0x1f", "0o17", "1_0", "null"]
)
def test_a_hash_that_looks_like_a_number_stays_text(opened, tmp_path, digest):
    experiment = opened()
    job = experiment.job(experiment.plan()[3])
    job = job.model_copy(update={"code": {"luffy": digest}})
    write_job(tmp_path / "config.yaml", job)
    assert read_job(tmp_path / "config.yaml").code == {"luffy": digest}


@pytest.mark.parametrize(
    ("written", "instead", "complaint"),
    [
        ("prompts_per_step: 4", "prompts_per_stop: 4", "prompts_per_stop: unknown key"),
        ("stage: rl", "stage: sft", "settings"),  # of another stage
    ],
)
def test_a_mistake_in_a_job_names_the_field(opened, tmp_path, written, instead, complaint):
    experiment = opened()
    write_job(tmp_path / "config.yaml", experiment.job(experiment.plan()[3]))
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace(written, instead))
    with pytest.raises(ConfigError, match=complaint):
        read_job(tmp_path / "config.yaml")


def test_inputs_are_found_in_a_workspace_that_was_copied_and_in_one_that_was_moved(opened, finish_all, workspace):
    experiment = opened()
    finish_all(experiment)
    plan = experiment.plan_node("rl")
    write_job(plan.directory / "config.yaml", experiment.job(plan))
    for take in (shutil.copytree, shutil.move):
        root = workspace.root.with_name(take.__name__)
        take(workspace.root, root)
        directory = root / plan.directory.relative_to(workspace.root)
        found = inputs_of(read_job(directory / "config.yaml"), directory)
        expected = {name: root / path.relative_to(workspace.root) for name, path in plan.inputs.items()}
        assert found == expected


def test_inputs_outside_a_workspace_are_where_the_job_says(opened, tmp_path):
    experiment = opened()
    job = experiment.job(experiment.plan()[1]).model_copy(update={"inputs": {"data": "/elsewhere/data"}})
    assert str(inputs_of(job, tmp_path / "mine" / "stage")["data"]) == "/elsewhere/data"
