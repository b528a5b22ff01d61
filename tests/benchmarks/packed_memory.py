"""Peak memory of a packed micro-batch's forward and backward pass, with and without a square mask.

Run: python tests/benchmarks/packed_memory.py [tokens a sequence]

Each figure is from a fork of its own: by how much the pass raises resident memory at its highest (`VmHWM`) above that
with the model and its gradients loaded. `mask` is transformers' own sdpa, which separates packed sequences by a mask
over all pairs of tokens; `sequences` is luffy's, call by call. The model is a Qwen2 of 2 million parameters.
"""

import multiprocessing
from multiprocessing.connection import Connection

import torch
from measuring import forget_peak, memory_bytes, numbers
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.training.attention import attention_inputs, set_attention
from luffy.training.policy_model import PolicyModel

TOKENS = (1024, 2048, 4096, 8192, 16384)
CONFIG = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=False,
)  # fmt: skip
PACKED = ExecutionConfig(packing=True)


def take_pass(policy: PolicyModel, way: str, tokens: int, length: int) -> None:
    """Forward and backward over one row with sequences of `length` tokens."""
    position_1T = (torch.arange(tokens) % length).unsqueeze(0)
    ids_1T = torch.randint(1, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    bounds = attention_inputs(position_1T, PACKED) if way == "sequences" else {}
    policy(ids_1T, position_1T, position_1T >= 32, bounds, entropy="none")[0].sum().backward()


def measure(way: str, tokens: int, length: int, result: Connection) -> None:
    """Send the bytes by which a pass raised the peak."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    if way == "sequences":
        set_attention(model, PACKED)
    policy = PolicyModel(model, 1.0, 1024)
    take_pass(policy, way, 64, 32)
    forget_peak()
    before = memory_bytes("VmRSS")
    take_pass(policy, way, tokens, length)
    result.send(memory_bytes("VmHWM") - before)


def in_a_fork(way: str, tokens: int, length: int) -> int:
    """The parent has run no operator yet, so its threads do not have to survive the fork."""
    context = multiprocessing.get_context("fork")
    result, sender = context.Pipe(duplex=False)
    child = context.Process(target=measure, args=(way, tokens, length, sender))
    child.start()
    sender.close()
    found = result.recv()
    child.join()
    return int(found)


def main() -> None:
    """Print one line a size."""
    (length,) = numbers(512)
    print(f"| tokens, in sequences of {length} | mask | sequences | sequences, per token |\n|---|---|---|---|")
    for tokens in TOKENS:
        mask, sequences = (in_a_fork(way, tokens, length) for way in ("mask", "sequences"))
        columns = (f"{tokens:,}", f"{mask / 2**20:,.0f} MiB", f"{sequences / 2**20:,.0f} MiB")
        print(f"| {' | '.join(columns)} | {sequences / tokens / 1024:.1f} KiB |", flush=True)


if __name__ == "__main__":
    main()
