import subprocess
import sys
from pathlib import Path

import pytest

from luffy.config import available_presets, load_experiment

ROOT = Path(__file__).parents[3] / "exp_configs"
EXPERIMENTS = sorted(ROOT.glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_loads(path):
    assert load_experiment(path).name


@pytest.mark.parametrize("name", available_presets("methods"))
def test_every_method_loads_over_smoke(name):
    chain = "sft" if name in ("sft", "dft") else "rl"
    config = load_experiment(ROOT / "smoke.yaml", [f"method={name}", f"chain={chain}"])
    assert (config.objective is not None) == (chain == "rl")
    assert config.method == name


@pytest.mark.parametrize("name", available_presets("methods"))
def test_every_group_has_eight_rows_and_every_method_names_its_paper_and_denominator(name):
    comment = (ROOT / "methods" / f"{name}.yaml").read_text().split("\nobjective:")[0].split("\nchain:")[0]
    assert "arXiv" in comment or "LUFFY paper" in comment
    assert "# Normaliser:" in comment or "Normaliser, " in comment or "normaliser" in comment
    if name not in ("sft", "dft"):
        objective = load_experiment(ROOT / "smoke.yaml", [f"method={name}", "chain=rl"]).objective
        assert objective is not None and objective.group.size == 8


@pytest.mark.parametrize("name", available_presets("chains"))
def test_every_chain_loads_over_smoke(name):
    overrides = [f"chain={name}"] if name != "rl" else ["chain=rl", "method=luffy"]
    assert load_experiment(ROOT / "smoke.yaml", overrides).chain == name


def test_the_configuration_is_read_without_torch():
    code = "import sys, luffy.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
