"""The memory estimate against the peak of a real update, for the shape of a model of 0.5 B parameters."""

import dataclasses

import pytest
import torch
from reference.gradient_case import ROOT
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config import load_experiment
from luffy.model_shape import from_model_config
from luffy.objectives.schedules import objective_at
from luffy.pipeline.memory import GIB, estimate_memory
from luffy.training.batching import collate
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group
from luffy.types import FinishReason, Outcome, Source, TrainBatch, Trajectory

SHAPE = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
"""Qwen2.5-0.5B."""
TOKENS = 16_384
"""Of a micro-batch: eight rows of 2,048."""
LAYOUTS = {
    "ZeRO 1": ("execution.zero_stage=1",),
    "ZeRO 3, checkpointing": ("execution.zero_stage=3", "execution.gradient_checkpointing=true"),
    "packed": ("execution.zero_stage=1", "execution.packing=true"),
    "offloaded": ("execution.zero_stage=1", "execution.offload_optimizer=true"),
}


def batch(pad_id: int = 0) -> TrainBatch:
    """Two full micro-batches: in the second one, gradients are there already."""
    ids = torch.randint(1, SHAPE.vocab_size, (16, 2048), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        Trajectory(
            prompt_ids=tuple(row[:256]),
            response_ids=tuple(row[256:]),
            source=(Source.ON_POLICY,) * 1792,
            logp_behavior=(-12.0,) * 1792,
            weight_version=(0,) * 1792,
            reward=float(number % 2),
            outcome=Outcome.CORRECT if number % 2 else Outcome.WRONG,
            finish_reason=FinishReason.STOP,
        )
        for number, row in enumerate(ids)
    ]
    made = collate(rows, torch.tensor([row.reward - 0.5 for row in rows]), pad_id)
    return dataclasses.replace(made, logp_old_BT=made.logp_behavior_BT.nan_to_num())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_estimate_is_within_ten_per_cent_of_the_peak(layout):
    config = load_experiment(
        ROOT / "exp_configs" / "luffy_qwen2.5_math_1.5b.yaml",
        [
            *("chain=rl", "method=on_policy", "execution.ray.placement=disaggregated"),
            *("execution.ray.trainer_ranks=1", "execution.ray.engines=1"),
            *(f"execution.micro_batch_tokens={TOKENS}", "execution.offload_optimizer=false"),
            *("execution.packing=false", "execution.compile=false", "execution.gradient_checkpointing=false"),
            *LAYOUTS[layout],
        ],
    )
    assert config.rl is not None and config.objective is not None
    shape = from_model_config(SHAPE.to_dict())
    assert shape is not None
    trainer = next(gpu for gpu in estimate_memory(shape, config, None) if gpu.name == "trainer GPU")
    estimated = trainer.total_gib - trainer.gib("process")  # torch does not count the CUDA context

    init_process_group()
    model = Qwen2ForCausalLM._from_config(SHAPE, dtype=torch.bfloat16)
    policy = Policy(model, config.rl.optimizer, config.execution, "bfloat16", config.rl.temperature)
    step = objective_at(config.objective.terms, 1, 10, config.rl.max_response_tokens, {})
    for _ in range(2):  # the first step allocates the optimizer's states
        policy.update(batch(), step, config.rl.optimizer.lr)
    measured = torch.cuda.max_memory_allocated() / GIB
    print(f"{layout}: estimated {estimated:.2f} GiB, measured {measured:.2f} GiB")
    assert measured <= estimated <= 1.1 * measured
