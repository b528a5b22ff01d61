"""The nearest layout, on GPUs that are made up: it fits, and nothing nearer does."""

from pathlib import Path

import pytest

from luffy.config import ExperimentConfig, load_experiment
from luffy.errors import ConfigError
from luffy.pipeline.machine.architecture import architecture_of
from luffy.pipeline.machine.layout_checks import Placement, complaints_about
from luffy.pipeline.machine.layout_search import nearest_layout

SEVEN_B = Path(__file__).parents[4] / "exp_configs" / "luffy_qwen2.5_math_7b.yaml"
SPLIT = ["execution.ray={placement: disaggregated, trainer_ranks: 4, engines: 4}"]
LARGE = ["model.path=Qwen/Qwen2.5-32B"]
SFT = ["chain=sft", "method=sft", "sft={epochs: 1, batch_size: 64, optimizer: {lr: 1e-5}}"]


def placement(config: ExperimentConfig, *gpus_gib: float) -> Placement:
    return Placement(config, config.stages, gpus_gib or None, architecture_of(config.model))


def experiment(*overrides: str) -> ExperimentConfig:
    return load_experiment(SEVEN_B, ["execution.gpu_memory_gb=null", *overrides])


@pytest.mark.parametrize(
    ("overrides", "gpus", "nearest"),
    [
        ([], [40.0] * 8, "offload_optimizer=true"),
        (["execution.zero_stage=1"], [79.0] * 8, "zero_stage=2"),
        ([*SPLIT, "execution.zero_stage=1"], [79.0] * 16, "zero_stage=2"),
        # Fewer GPUs: as many ranks and engines as there are, and more of the optimizer's states on each.
        (
            [],
            [79.0] * 4,
            "vllm.gpu_memory_utilization=0.5 vllm.engines=4 ray.trainer_ranks=4 ray.engines=4",
        ),
        (
            [*SPLIT, "execution.vllm.tensor_parallel_size=2"],
            [79.0] * 4,
            "vllm.tensor_parallel_size=1 vllm.engines=4 ray.trainer_ranks=3 ray.engines=1",
        ),
        # An engine larger than its GPU is spread over several.
        (
            [*LARGE, *SPLIT],
            [40.0] * 64,
            "ray.trainer_ranks=32 zero_stage=3 vllm.gpu_memory_utilization=0.9 vllm.tensor_parallel_size=2",
        ),
        # Weights that do not fit beside an engine, however they are sharded, stay in CPU memory.
        (
            LARGE,
            [79.0] * 8,
            "zero_stage=3 offload_parameters=true offload_optimizer=true vllm.gpu_memory_utilization=0.9",
        ),
        ([*SFT, "execution.gradient_checkpointing=false"], [79.0] * 8, "gradient_checkpointing=true"),
        ([*SFT, "execution.micro_batch_tokens=262144"], [79.0] * 8, "micro_batch_tokens=65536"),
        ([*SFT, "execution.ray={trainer_ranks: 1, engines: 1}"], [79.0] * 8, "ray.trainer_ranks=4 ray.engines=4"),
        # The number of GPUs is unknown: those that the experiment asks for.
        (
            ["execution.gpu_memory_gb=40", "execution.vllm.gpu_memory_utilization=0.2"],
            [],
            "offload_optimizer=true vllm.gpu_memory_utilization=0.5",
        ),
    ],
)
def test_the_nearest_layout_fits_and_every_change_in_it_is_needed(
    overrides: list[str], gpus: list[float], nearest: str
) -> None:
    assert complaints_about(placement(experiment(*overrides), *gpus))
    found = nearest_layout(placement(experiment(*overrides), *gpus))
    assert found is not None
    assert complaints_about(placement(experiment(*overrides, *found), *gpus)) == []
    for left_out in found:
        others = [change for change in found if change != left_out]
        with pytest.raises((ConfigError, AssertionError)):
            assert not complaints_about(placement(experiment(*overrides, *others), *gpus))
    assert " ".join(found).replace("execution.", "") == nearest


def test_where_nothing_fits_none_is_named() -> None:
    assert nearest_layout(placement(experiment(*LARGE), *[16.0] * 8)) is None
    assert nearest_layout(placement(experiment(*SPLIT), 79.0)) is None  # a rank and an engine need two
