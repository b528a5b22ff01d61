"""Which placements a bench tries."""

from pathlib import Path

import pytest

from luffy.config import ExperimentConfig, load_experiment
from luffy.costs.layouts import splits, zero_stages
from luffy.pipeline.machine import resources

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "detected_gpus", lambda: ())


def experiment(name: str, *overrides: str) -> ExperimentConfig:
    return load_experiment(ROOT / "exp_configs" / f"{name}.yaml", overrides)


def test_one_process_leaves_no_choice() -> None:
    config = experiment("smoke")
    assert [layout.words for layout in splits(config)] == ["one process"]
    assert len(zero_stages(config)) == 1


def test_every_split_of_the_same_number_of_gpus_is_tried_the_configured_one_first() -> None:
    config = experiment("smoke_ray", "execution.ray.trainer_ranks=2", "execution.ray.engines=2")
    layouts = splits(config)
    assert layouts[0].words == "2 trainer ranks and 2 engines, disaggregated, ZeRO 2"
    pairs = {(each.config.execution.ray.trainer_ranks, each.config.execution.ray.engines) for each in layouts}
    assert pairs == {(2, 2), (3, 1), (1, 3)}  # colocated engines could not run ahead of the trainer


def test_engines_may_share_the_gpus_where_rollouts_wait_for_the_trainer() -> None:
    config = experiment("smoke_ray", "rl.max_staleness=0", "rl.correction=null")
    assert "3 trainer ranks and 3 engines, colocated, ZeRO 2" in [layout.words for layout in splits(config)]


def test_an_engine_over_several_gpus_takes_them_all_from_the_ranks() -> None:
    config = experiment("smoke_ray", "execution.ray.trainer_ranks=2", "execution.vllm.tensor_parallel_size=2")
    pairs = {(each.config.execution.ray.trainer_ranks, each.config.execution.ray.engines) for each in splits(config)}
    assert pairs == {(2, 1)}


def test_what_does_not_fit_by_the_estimate_is_not_tried() -> None:
    small = experiment("luffy_qwen2.5_math_7b", "execution.gpu_memory_gb=79")
    words = [layout.words for layout in zero_stages(small)]
    assert len(words) < 4 and words[0].endswith(f"ZeRO {small.execution.zero_stage}")


def test_zero_stages_that_the_type_rules_out_are_not_tried() -> None:
    config = experiment("smoke_ray", "model.dtype=bfloat16", "execution.zero_stage=1")
    assert {each.config.execution.zero_stage for each in zero_stages(config)} == {1, 2, 3}
