"""Peak memory of a packed micro-batch's forward and backward pass, with and without a square mask.

Run: python tests/benchmarks/packed_memory.py [tokens a sequence]

Each figure is the growth of a fresh process's resident memory above that with the model and its gradients loaded, at
its highest (`VmHWM`). `mask` is transformers' own sdpa, which separates packed sequences by a mask over all pairs of
tokens; `sequences` is `execution.attention: sdpa`. The model has 3 million parameters.
"""

import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.training.attention import attention_inputs, set_attention
from luffy.training.policy_model import PolicyModel

TOKENS = (1024, 2048, 4096, 8192, 16384)
CONFIG = Qwen2Config(
    vocab_size=1024, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=False,
)  # fmt: skip
PACKED = ExecutionConfig(packing=True)


def packed(tokens: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, positions and response mask of one row with sequences of `length` tokens."""
    position_1T = (torch.arange(tokens) % length).unsqueeze(0)
    ids_1T = torch.randint(1, 1024, (1, tokens), generator=torch.Generator().manual_seed(0))
    return ids_1T, position_1T, position_1T >= 32


def take_pass(policy: PolicyModel, way: str, tokens: int, length: int) -> None:
    ids_1T, position_1T, response_1T = packed(tokens, length)
    bounds = attention_inputs(position_1T, PACKED) if way == "sequences" else {}
    policy(ids_1T, position_1T, response_1T, bounds, entropy_gradient=False)[0].sum().backward()


def memory(field: str) -> int:
    """A line of this process's `/proc/self/status`, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def measure(way: str, tokens: int, length: int) -> int:
    """Bytes by which a pass raised the peak."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    if way == "sequences":
        set_attention(model, PACKED)
    policy = PolicyModel(model, 1.0, 1024)
    take_pass(policy, way, 64, 32)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    take_pass(policy, way, tokens, length)
    return memory("VmHWM") - before


def main() -> None:
    """Print one line a size."""
    if sys.argv[1:2] == ["--one"]:
        print(measure(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
        return
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    table = Table("tokens", "mask", "sequences", "sequences, per token", title=f"sequences of {length} tokens")
    for tokens in TOKENS:
        mask, sequences = (
            int(
                subprocess.run(
                    [sys.executable, __file__, "--one", way, str(tokens), str(length)],
                    stdout=subprocess.PIPE, text=True, check=True,
                ).stdout
            )
            for way in ("mask", "sequences")
        )  # fmt: skip
        table.add_row(
            f"{tokens:,}",
            f"{mask / 2**20:,.0f} MiB",
            f"{sequences / 2**20:,.0f} MiB",
            f"{sequences / tokens / 1024:.1f} KiB",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
