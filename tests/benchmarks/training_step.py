"""Seconds of one supervised optimizer step of the embedded base policy, by micro-batch size and packing.

Run: python tests/benchmarks/training_step.py [threads]

All settings take the same 128 examples in turn, nine rounds, in one process; the table shows the fastest round.
"""

from functools import partial

import torch
from measuring import fastest, numbers, show
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.config.training import OptimizerConfig
from luffy.objectives.schedules import objective_at
from luffy.stages.base import LANGUAGE_MODELLING
from luffy.training.batching import collate
from luffy.training.policy import Policy
from luffy.training.supervised import demonstration

SETTINGS = ({"micro_batch_tokens": 16384}, {"micro_batch_tokens": 4096}, {"micro_batch_tokens": 2048},
            {"micro_batch_tokens": 1024}, {"micro_batch_tokens": 1024, "packing": True})  # fmt: skip


def examples() -> list:
    """128 rows with the lengths of the arithmetic corpus: mostly short, some of 50 tokens and more."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(128):
        operations = int(torch.randint(1, 7, (), generator=generator))
        stepwise = float(torch.rand((), generator=generator)) < 0.3
        response = 10 + 6 * operations if stepwise else 5
        rows.append(demonstration([1] * (5 + 2 * operations), [2] * response))
    return rows


def main() -> None:
    """Print one line a setting."""
    torch.set_num_threads(*numbers(1))
    rows = examples()
    batch = collate(rows, torch.zeros(len(rows)), pad_id=0)
    objective = objective_at((LANGUAGE_MODELLING,), step=1, total_steps=1, max_response_tokens=64)
    ways = {}
    for settings in SETTINGS:
        config = Qwen2Config(
            vocab_size=79, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=4, tie_word_embeddings=False,
        )  # fmt: skip
        policy = Policy(Qwen2ForCausalLM(config), OptimizerConfig(lr=1e-3), ExecutionConfig(**settings), "float32")
        ways[str(settings)] = partial(policy.update, batch, objective, 1e-3)
    took = fastest(ways, rounds=9)
    first = next(iter(took.values()))
    rows = [(name, f"{seconds:.3f}", f"{seconds / first:.2f}") for name, seconds in took.items()]
    show(("setting", "seconds a step", "against the first"), rows)


if __name__ == "__main__":
    main()
