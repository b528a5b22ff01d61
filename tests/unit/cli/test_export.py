"""The model card of a run's policy."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.refusals import refused
from synthetic.finished_chain import write_chain

from luffy.cli.commands.export import write_card
from luffy.config import load_experiment
from luffy.errors import DataError
from luffy.pipeline.records import RecordedStage, RunRecord


@pytest.fixture
def run(tmp_path: Path) -> RunRecord:
    config, inputs = write_chain(tmp_path / "chain", num_problems=20, num_steps=4)
    stages = {
        "prepare_data" if name == "data" else name: RecordedStage(name, directory, "run", "")
        for name, directory in inputs.items()
    }
    return RunRecord(tmp_path, "finished", stages=stages, config=config.model_dump(mode="json"))


def test_a_card_has_data_method_accuracies_and_the_command(run: RunRecord, tmp_path: Path) -> None:
    write_card(run, "rl", tmp_path)
    text = (tmp_path / "README.md").read_text()
    known = yaml.safe_load(text.split("---\n")[1])
    assert (known["library_name"], known["tags"]) == ("transformers", ["luffy"])
    assert "The policy after the stage rl of arithmetic, which starts from a policy trained from scratch." in text
    assert "| suite | base | SFT | RL |" in text and "| longer, sampled 20 problems |" in text
    assert "### rl" in text and "-A rho / (rho + 0.1)" in text
    assert "| train | arithmetic |" in text and "luffy run experiment.yaml" in text
    assert load_experiment(tmp_path / "experiment.yaml") == run.configuration


def test_a_run_that_evaluates_nothing_has_no_card(run: RunRecord, tmp_path: Path) -> None:
    alone = replace(run, config={**run.config, "stages": ["prepare_data", "base", "sft", "rl"]})
    with refused("no stage evaluate", error=DataError):
        write_card(alone, "rl", tmp_path)
