"""What `luffy config --explain` says about the training stages of an experiment."""

import re

import pytest
from reference.taught_presets import teacher_overrides

from luffy.cli.objective_view import explain_experiment
from luffy.config import load_experiment
from luffy.config.shipped import EXPERIMENTS
from luffy.errors import ConfigError
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.job import JOB_FILE, write_job
from luffy.pipeline.workspace import Workspace

METHODS = sorted(file.stem for file in (EXPERIMENTS / "methods").glob("*.yaml"))


@pytest.mark.parametrize("method", METHODS)
def test_every_term_of_a_method_is_explained(method):
    overrides = [f"method={method}", *teacher_overrides(method)]
    explained = dict(explain_experiment("arithmetic", overrides))
    config = load_experiment("arithmetic", overrides)
    objectives = {"sft": config.sft and config.sft.objective, "rl": config.objective}
    assert set(explained) == {"sft", "rl"} & set(config.stages)
    for stage, text in explained.items():
        for term in objectives[stage].terms:
            assert re.search(rf"^{term.name} +\S", text, re.MULTILINE)


def test_a_stage_explains_its_own_configuration_as_its_experiment_does(tmp_path):
    experiment = open_experiment(load_experiment("arithmetic"), Workspace(tmp_path))
    for plan in experiment.plan():
        if plan.node.stage in ("sft", "rl"):
            write_job(tmp_path / JOB_FILE, experiment.job(plan))
            expected = dict(explain_experiment("arithmetic"))[plan.node.name]
            assert explain_experiment(tmp_path / JOB_FILE) == [(plan.node.stage, expected)]


def test_a_stage_that_does_not_train_is_refused():
    with pytest.raises(ConfigError, match="no training stage 'evaluate_rl'; there are sft, rl"):
        explain_experiment("arithmetic", only="evaluate_rl")
