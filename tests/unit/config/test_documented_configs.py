"""The YAML that the documentation tells a newcomer to write loads as it stands."""

import json
import re
import shlex
from pathlib import Path

import pytest
from installed import needs_smollm2

from luffy.cli.main import main
from luffy.config import available_presets, load_experiment
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
_YAML = re.compile(r"```yaml\n(name: (\w+)\n.*?)```", re.DOTALL)


@pytest.fixture
def tutorial(tmp_path: Path) -> Path:
    """A folder with every file of the tutorial."""
    for text, name in _YAML.findall((DOCS / "tutorial.md").read_text()):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path


def test_the_tutorials_experiment_has_its_own_data_alone(tutorial: Path) -> None:
    data = load_experiment(tutorial / "mine.yaml").data
    assert data.train is not None and data.corpus is not None
    assert {source.kind for source in (data.train, data.corpus, *data.suites.values())} == {"file"}
    assert list(data.suites) == ["held_out"]


def test_the_tutorials_real_model_takes_the_place_of_the_embedded_one(tutorial: Path) -> None:
    config = load_experiment(tutorial / "mine_real.yaml")
    assert config.model.path == "/models/Qwen2.5-Math-1.5B"
    assert (config.model.architecture, config.base, config.data.corpus) == (None, None, None)


def test_the_tutorials_comparison_gives_every_arm_its_budget(tutorial: Path) -> None:
    runs = load_sweep(tutorial / "compare_mine.yaml").reported_runs()
    assert [(run.arm, run.seed) for run in runs[:3]] == [("luffy", 1), ("sft", 1), ("sft_then_rl", 1)]
    assert [run.config.rl.steps for run in runs[:3] if "rl" in run.config.stages and run.config.rl] == [24, 20]


@pytest.mark.parametrize(("wanted", "num_runs"), [("compare_mine", 6), ("my_grid", 9)])
def test_the_comparison_and_the_grid_of_the_guide_load(tmp_path: Path, wanted: str, num_runs: int) -> None:
    text = next(text for text, name in _YAML.findall((DOCS / "evaluation.md").read_text()) if name == wanted)
    (tmp_path / "it.yaml").write_text(text)
    assert len(load_sweep(tmp_path / "it.yaml").reported_runs()) == num_runs


def test_the_tuning_of_the_guide_is_that_of_a_shipped_comparison() -> None:
    guide = (DOCS / "evaluation.md").read_text()
    values = parse_scalar(
        next(text for text in re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL) if "select:" in text)
    )
    shipped = load_sweep("compare_tuned")
    overrides = [f"grid={json.dumps(values['grid'])}", f"arms.sft.grid={json.dumps(values['arms']['sft']['grid'])}"]
    assert load_sweep("compare_tuned", [*overrides, "select.random=3"]).candidates() == shipped.candidates()


@pytest.mark.parametrize("name", available_presets("methods"))
def test_every_method_is_in_the_tables_of_both_readmes(name: str) -> None:
    methods = (ROOT / "exp_configs" / "README.md").read_text().partition("### Weight of a token")[0]
    assert f"\n| `{name}` | " in methods
    assert f"`{name}`" in (ROOT / "README.md").read_text()


_COMMAND = re.compile(r"`luffy ((?:run|grid|compare) [^`]+)`")
_KNOWN = [
    pytest.param(command, marks=needs_smollm2 if "smollm2" in command else ())
    for command in _COMMAND.findall((DOCS / "known_experiments.md").read_text())
]


@pytest.mark.parametrize("command", _KNOWN)
def test_a_command_of_the_known_experiments_can_be_planned(command: str, tmp_path: Path, capsys) -> None:
    arguments = [*shlex.split(command), "--dry-run", "--workspace", str(tmp_path)]
    assert main(arguments) == EXIT_OK, capsys.readouterr().err
    assert "prepare_data" in capsys.readouterr().out


def test_the_known_experiments_are_all_found() -> None:
    assert len(_KNOWN) >= 20


def test_the_experiment_of_the_readme_is_one(tmp_path):
    _, _, text = (ROOT / "README.md").read_text().partition("## Your data, your model")
    (tmp_path / "mine.yaml").write_text(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])
    config = load_experiment(tmp_path / "mine.yaml")
    assert (config.data.train.kind, config.method, set(config.stages) >= {"rl", "evaluate"}) == ("file", "luffy", True)
