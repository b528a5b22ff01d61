"""Which stages a bench measures, and what it says of the others."""

from pathlib import Path

import pytest
from installed import needs_smollm2

from luffy.config import load_experiment
from luffy.costs.measurable import choose
from luffy.costs.workloads import workload_of
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

ROOT = Path(__file__).parents[3]


def chosen(tmp_path: Path, name: str, *overrides: str) -> tuple[list[str], dict[str, str]]:
    config = load_experiment(ROOT / "exp_configs" / f"{name}.yaml", overrides)
    experiment = open_experiment(config, Workspace(tmp_path), code=lambda rooms: {})
    plans, refusals = choose(config, experiment.plan())
    return [plan.node.name for plan in plans], dict(line.split(": not measured: ") for line in refusals)  # type: ignore[arg-type,misc]


def test_training_and_every_evaluation_are_measured(tmp_path: Path) -> None:
    names, refusals = chosen(tmp_path, "smoke")
    assert names == ["base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl"]
    assert set(refusals) == {"prepare_data", "report"}


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        ("rl", ["base", "rl", "evaluate_base", "evaluate_rl"]),
        ("sft", ["base", "sft", "evaluate_base", "evaluate_sft"]),
    ],
)
def test_chains_without_sft_or_rl_have_their_own_stages_alone(tmp_path: Path, chain: str, expected: list[str]) -> None:
    method = {"rl": "luffy", "sft": "sft"}[chain]
    assert chosen(tmp_path, "smoke", f"chain={chain}", f"method={method}")[0] == expected


@needs_smollm2
def test_a_policy_that_is_only_copied_is_not_measured(tmp_path: Path) -> None:
    names, refusals = chosen(tmp_path, "smollm2_luffy")
    assert names == ["rl", "evaluate_base", "evaluate_rl"]
    assert refusals["base"] == "it trains nothing"


def test_engines_elsewhere_are_left_alone(tmp_path: Path) -> None:
    servers = "execution.server.urls=[http://127.0.0.1:9]"
    names, refusals = chosen(tmp_path, "smoke", "rl.engine=openai", servers)
    assert "rl" not in names and "servers elsewhere" in refusals["rl"]
    names, refusals = chosen(tmp_path, "smoke", "evaluation.engine=openai", servers)
    assert "rl" in names and "servers elsewhere" in refusals["evaluate"]


def test_stages_that_answer_training_prompts_are_measured_rounds_once_and_teachers_are_not(tmp_path: Path) -> None:
    assert "difficulty" in chosen(tmp_path, "smoke", "difficulty.policy=base")[0]
    names, _ = chosen(tmp_path, "expert_iteration")
    assert [name for name in names if not name.startswith("evaluate_")] == ["base", "sample_1", "sft_1"]
    # A measured round is the measure of all.
    config = load_experiment(ROOT / "exp_configs" / "expert_iteration.yaml", [])
    nodes = [plan.node for plan in open_experiment(config, Workspace(tmp_path), code=lambda rooms: {}).plan()]
    for stage in ("sample", "sft"):
        rounds = [node for node in nodes if node.stage == stage]
        assert len(rounds) == 3
        assert len({workload_of(config, nodes, node, "this machine").key for node in rounds}) == 1
    names, refusals = chosen(tmp_path, "taught_by_endpoint")
    assert "synthesize" not in names and "teachers' models" in refusals["synthesize"]
