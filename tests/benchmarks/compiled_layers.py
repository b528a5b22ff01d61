"""CPU seconds of the gradient of a batch with and without `execution.compile`, in turn.

Run: python tests/benchmarks/compiled_layers.py [rows] [tokens] [threads]

The same rows for the same model (14 million parameters, float32), three rounds of each in one process; the table shows
the fastest round in seconds of the process's CPU time, which other jobs on the machine disturb less than wall time, and
the seconds until the policy had its first gradient. A second run finds the compiled code on disk.
"""

import copy
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference.attention_case import batch_of, rows_of
from reference.gradient_case import OPTIMIZER, step_of

from luffy.config.execution import ExecutionConfig
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group

CONFIG = Qwen2Config(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    """Print one line a way."""
    numbers = [int(argument) for argument in sys.argv[1:]]
    rows, tokens, threads = (numbers + [16, 300, 1][len(numbers) :])[:3]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    init_process_group()
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    batch = batch_of(rows_of([(50, tokens - 50)] * rows))
    policies, ready = {}, {}
    for name, compiled in (("plain", False), ("compiled", True)):
        began = time.perf_counter()
        execution = ExecutionConfig(compile=compiled, micro_batch_tokens=8 * tokens)
        policies[name] = Policy(copy.deepcopy(model), OPTIMIZER, execution, "float32")
        policies[name].accumulate(batch, step_of("sft"))
        ready[name] = time.perf_counter() - began
    fastest = dict.fromkeys(policies, float("inf"))
    for _ in range(3):
        for name, policy in policies.items():
            began = time.process_time()
            policy.accumulate(batch, step_of("sft"))
            fastest[name] = min(fastest[name], time.process_time() - began)
    table = Table(
        "layers", "CPU seconds", "first gradient after (s)", title=f"{rows} rows of {tokens} tokens, {threads} threads"
    )
    for name, took in fastest.items():
        table.add_row(name, f"{took:.2f}", f"{ready[name]:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
