"""Four ranks of which two or all share each sequence: steps of the policy, the learner and the critic, and attention.

Rank 0 prints the relative errors against the float64 references, and what a model is refused with.

Run: torchrun --nproc-per-node 4 tests/distributed/sequence_worker.py
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.attention_case import batch_of, model_of, recurrent_model, rows_of
from reference.gradient_case import OPTIMIZER, execution, relative_l2, terms_of, tiny_model
from reference.learner_case import two_updates
from reference.rows import evaluate
from reference.value_case import engine_steps, part_of, reference_steps

from luffy.errors import DataError
from luffy.objectives.schedules import objective_at
from luffy.processes import exit_without_finalizing
from luffy.training import attention
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group

LENGTHS = ((3, 9), (1, 1), (6, 2), (2, 17), (4, 4))
"""No micro-batch of these rows has a multiple of four tokens."""
PADDED: dict[str, object] = {"micro_batch_tokens": 19}
PACKED: dict[str, object] = {"micro_batch_tokens": 10_000, "packing": True}
ATTENTION = {"qwen2, half windowed": PADDED, "qwen3": PACKED, "mistral": PACKED}
TWO_OF_FOUR = {"sequence_parallel": 2}
METHODS = {"luffy": 3, "opd": 1}
"""Preset and ZeRO stage: without other models, with a teacher."""


def learner_error(preset: str) -> float:
    """Of the movement over two updates, on two shards."""
    settings = {"zero_stage": METHODS[preset], "packing": preset == "luffy", **TWO_OF_FOUR}
    return two_updates(preset, num_ranks=2, rank=dist.get_rank() // 2, micro_batch_tokens=40, **settings)[0]


def critic_error() -> float:
    """Of the gradient of the decoder and of the head, on two shards."""
    rows = (slice(0, 1), slice(1, None))[dist.get_rank() // 2]
    expected, _ = reference_steps(tiny_model(), value_clip=0.2)
    found, *_ = engine_steps(tiny_model(), 0.2, rows, {"zero_stage": 2, "micro_batch_tokens": 25, **TWO_OF_FOUR})
    return max(relative_l2(part_of(found, part), part_of(expected, part)) for part in ("decoder.", "head."))


def attention_error(kind: str, layout: dict[str, object]) -> float:
    """Of the gradient of a model with four query heads and two key heads, one query head a rank."""
    rows, model64 = rows_of(LENGTHS), model_of(kind, "eager").double()
    num_tokens = sum(len(row.response_ids) for row in rows)
    (-sum(evaluate(model64, row)[0].sum() for row in rows) / num_tokens).backward()
    policy = Policy(
        model_of(kind), OPTIMIZER, execution(sequence_parallel=4, gradient_checkpointing=True, **layout), "float32"
    )
    found: dict[str, Tensor] = {}
    policy.accumulate(batch_of(rows), objective_at(terms_of("sft"), 1, 1, 1))
    for name, parameter in policy.causal_lm.named_parameters():
        found[name] = safe_get_full_grad(parameter).clone()
        dist.all_reduce(found[name])  # ZeRO 0 reduces at the step
    return relative_l2(
        {name: gradient / dist.get_world_size() for name, gradient in found.items()},
        {name: parameter.grad for name, parameter in model64.named_parameters()},
    )


def refusal() -> str:
    """Of a model with recurrent layers that does not say so in its configuration."""
    attention._attends_plainly = lambda model: True
    try:
        attention.set_attention(recurrent_model(), execution(sequence_parallel=2))
    except DataError as error:
        return str(error)
    return ""


def main() -> None:
    """Print one JSON object: the errors, by case, and the refusal on each rank."""
    init_process_group()
    errors = {f"learner {preset}": learner_error(preset) for preset in METHODS}
    errors["critic"] = critic_error()
    errors |= {f"attention {kind}": attention_error(kind, layout) for kind, layout in ATTENTION.items()}
    refusals: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(refusals, refusal())
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"errors": errors, "refusals": refusals}))
    dist.destroy_process_group()
    exit_without_finalizing(0)


if __name__ == "__main__":
    main()
