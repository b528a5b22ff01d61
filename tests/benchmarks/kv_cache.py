"""CPU seconds of the embedded engine with its own KV cache and with transformers' `DynamicCache`, in turn.

Run: python tests/benchmarks/kv_cache.py [rows] [tokens] [threads]

The same requests on the same model (14 million parameters, float32), two rounds of each in one process; the table shows
the faster round in seconds of the process's CPU time, which other jobs on the machine disturb less than wall time.
"""

import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from luffy.rollout import transformers_engine
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine, roomy_cache

CONFIG = Qwen2Config(
    vocab_size=512, hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6,
    num_key_value_heads=6, max_position_embeddings=2048, tie_word_embeddings=True,
)  # fmt: skip


def concatenated(config: PreTrainedConfig) -> DynamicCache:
    return DynamicCache(config=config)


def main() -> None:
    """Print one line a cache."""
    numbers = [int(argument) for argument in sys.argv[1:]]
    rows, tokens, threads = (numbers + [32, 256, 1][len(numbers) :])[:3]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    engine = TransformersEngine(Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa").eval(), rows)
    requests = [RolloutRequest(tuple(range(2, 50)), seed) for seed in range(rows)]
    caches = {"DynamicCache": concatenated, "with spare room": roomy_cache}
    fastest = dict.fromkeys(caches, float("inf"))
    found: dict[str, list[Completion]] = {}
    for _ in range(2):
        for name, cache in caches.items():
            transformers_engine.roomy_cache = cache
            began = time.process_time()
            found[name] = engine.generate(requests, SamplingParams(1.0, tokens, ()))
            fastest[name] = min(fastest[name], time.process_time() - began)
    table = Table("cache", "CPU seconds", title=f"{rows} rows of 48 + {tokens} tokens, {threads} threads")
    for name, took in fastest.items():
        table.add_row(name, f"{took:.2f}")
    Console().print(table)
    print(f"the same tokens: {len({tuple(row.token_ids for row in rows) for rows in found.values()}) == 1}")


if __name__ == "__main__":
    main()
