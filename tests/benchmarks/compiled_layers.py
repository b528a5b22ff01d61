"""CPU seconds of the gradient of a batch with and without `execution.compile`, in turn.

Run: python tests/benchmarks/compiled_layers.py [rows] [tokens] [threads]

The same rows for the same model (14 million parameters, float32), three rounds of each in one process; the table shows
the fastest round in seconds of the process's CPU time, which other jobs on the machine disturb less than wall time, and
the seconds until the policy had its first gradient. A second run finds the compiled code on disk.
"""

import copy
import time
from functools import partial

import torch
from measuring import fastest, numbers, show
from reference.attention_case import batch_of, rows_of
from reference.gradient_case import OPTIMIZER, step_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group

CONFIG = Qwen2Config(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip


def main() -> None:
    """Print one line a way."""
    rows, tokens, threads = numbers(16, 300, 1)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    init_process_group()
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    batch = batch_of(rows_of([(50, tokens - 50)] * rows))
    ways, ready = {}, {}
    for name, compiled in (("plain", False), ("compiled", True)):
        began = time.perf_counter()
        execution = ExecutionConfig(compile=compiled, micro_batch_tokens=8 * tokens)
        policy = Policy(copy.deepcopy(model), OPTIMIZER, execution, "float32")
        ways[name] = partial(policy.accumulate, batch, step_of("sft"))
        ways[name]()
        ready[name] = time.perf_counter() - began
    took = fastest(ways, clock=time.process_time)
    cells = [(name, f"{took[name]:.2f}", f"{ready[name]:.1f}") for name in ways]
    title = f"{rows} rows of {tokens} tokens, {threads} threads"
    show(("layers", "CPU seconds", "first gradient after (s)"), cells, title)


if __name__ == "__main__":
    main()
