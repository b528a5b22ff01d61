"""The YAML that the documentation tells a newcomer to write loads as it stands."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.installed import needs_smollm2

from luffy.cli.main import main
from luffy.config import available_presets, load_experiment
from luffy.config.many_runs.sweep_runs import load_sweep
from luffy.config.yaml_source import parse_scalar
from luffy.errors import EXIT_OK

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
_YAML = re.compile(r"```yaml\n(name: (\w+)\n.*?)```", re.DOTALL)


TUTORIAL = (DOCS / "tutorial.md").read_text()


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that the tutorial writes; its rows are those of the repository."""
    monkeypatch.chdir(ROOT)
    for name, text in re.findall(r"cat > (\w+\.yaml) <<'END'\n(.*?)END\n", TUTORIAL, re.DOTALL):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_tutorial_shows_the_experiment_that_ships() -> None:
    _, _, shipped = (ROOT / "exp_configs/own_data.yaml").read_text().partition("\n")
    assert f"```yaml\n{shipped}```" in TUTORIAL


def test_the_tutorial_shows_the_first_rows() -> None:
    shown = re.findall(r"```json\n(.*?)```", TUTORIAL, re.DOTALL)[0]
    rows = (ROOT / "data/samples/shop_train.jsonl").read_text()
    assert rows.startswith(shown) and len(rows.splitlines()) == 60


def test_the_tutorials_experiment_has_its_own_data_alone(tutorial: Path) -> None:
    config = load_experiment(tutorial / "mine.yaml")
    assert [source.path for source in config.data.suites.values()] == ["mine/test.jsonl"]
    assert config.data.train is not None and config.data.train.path == "mine/train.jsonl"


def test_the_tutorials_comparison_has_the_run_of_the_experiment(tutorial: Path) -> None:
    """So that its stages are reused."""
    luffy, other = (run.config for run in load_sweep(tutorial / "compare_mine.yaml").reported_runs())
    alone = load_experiment("own_data", ["sft.seed=0", "rl.seed=0"])
    assert (luffy.sft, luffy.rl) == (alone.sft, alone.rl)
    assert other.rl is not None and luffy.rl is not None and other.rl.steps == luffy.rl.steps


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
