"""What an update launches, and what its output head moves through memory, counted on a CPU.

Run: python tests/benchmarks/update_operations.py

The update is that of 64 packed sequences in four micro-batches, through 24 layers in bfloat16 with ZeRO 1, for LUFFY's
objective, its metrics included. torch's profiler counts operations that compute or copy, not views and allocations: on
a GPU each is a kernel or more. A GPU's attention is one call for a micro-batch and layer; on a CPU a call over the
whole row takes its place here, which counts alike. In compiled layers a fused loop is one operation.

Traffic is the size of all tensors over the vocabulary that the head's operations read and write, in bytes for each
logit: one token's score, its entropy and their backward pass. A compiled pass is counted as what its generated code
does: the scores read the logits twice, the gradient reads them once and is written once.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from unittest.mock import patch

import torch
from measuring import show
from reference.attention_case import batch_of, rows_of
from reference.gradient_case import OPTIMIZER, step_of
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.training import attention, fused_head
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group

SEQUENCES, TOKENS = 64, 48
CONFIG = Qwen2Config(
    vocab_size=23, hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
NO_WORK = (
    "view", "_unsafe_view", "reshape", "_reshape_alias", "transpose", "t", "permute", "slice", "select", "split",
    "narrow", "unsqueeze", "squeeze", "expand", "as_strided", "alias", "detach", "detach_", "unbind", "chunk",
    "flatten", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "set_", "resize_", "result_type",
    "resolve_conj", "resolve_neg", "split_with_sizes", "unflatten", "is_nonzero", "item", "movedim", "numpy_T",
    "contiguous", "to", "view_as",
)  # fmt: skip


def operations(compiled: bool, one_call_a_row: bool = True) -> int:
    """What one update launches, after two that are not counted."""
    torch.manual_seed(0)
    execution = ExecutionConfig(
        packing=True, micro_batch_tokens=SEQUENCES * TOKENS // 4, zero_stage=1, compile=compiled
    )
    model = Qwen2ForCausalLM._from_config(CONFIG, attn_implementation="sdpa").to(torch.bfloat16)
    policy = Policy(model, OPTIMIZER, execution, "bfloat16")
    batch, step = batch_of(rows_of([(TOKENS // 3, TOKENS - TOKENS // 3)] * SEQUENCES)), step_of("luffy")
    kernel = patch.multiple(attention, has_packed_kernel=lambda query, value: True, varlen_attn=one_call)
    with kernel if one_call_a_row else nullcontext():
        for _ in range(2):
            policy.update(batch, step, 1e-3)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            policy.update(batch, step, 1e-3)
    found = 0
    for event in profiler.events():
        name = event.name.removeprefix("aten::")
        works = event.name.startswith("aten::") and name not in NO_WORK
        # An operation made of others is counted as those, but one over a list of tensors is a single launch on a GPU.
        made = [child.name[6:] for child in event.cpu_children if child.name.startswith("aten::")]
        inner = not name.startswith("_foreach") and any(child not in NO_WORK for child in made)
        above = [parent.name for parent in ancestors(event)]
        in_list = any(parent.startswith("aten::_foreach") for parent in above)
        # A sum that casts what it adds does so in its own kernel on a GPU.
        in_sum = name == "copy_" and any(parent in ("aten::add_", "aten::add") for parent in above)
        if (works and not inner and not in_list and not in_sum) or "cpp_fused" in event.name:
            found += 1
    return found


def ancestors(event: FunctionEvent) -> Iterator[FunctionEvent]:
    while (event := event.cpu_parent) is not None:
        yield event


def one_call(query: Tensor, key: Tensor, value: Tensor, *_: object, scale: float, **__: object) -> Tensor:
    parts = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
    found = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
    return found[0].transpose(0, 1)


class Traffic(TorchDispatchMode):
    """Sums the bytes of all tensors with `width` columns that operations read and write."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in NO_WORK:
            given = [*args, *(kwargs or {}).values(), *(result if isinstance(result, tuple) else (result,))]
            self.bytes += sum(tensor.nbytes for tensor in given if self._counts(tensor))
        return result

    def _counts(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.shape[1] == self._width


def traffic(compiled: bool, tokens: int = 32, hidden: int = 8, vocabulary: int = 4096) -> float:
    """Bytes for each logit of the scores of `tokens` tokens and their gradient, in bfloat16."""
    head = fused_head.LogProbHead(torch.nn.Linear(hidden, vocabulary, bias=False).bfloat16(), 0.7, tokens // 2)
    hidden_NH = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    counted = Traffic(vocabulary)

    def fused(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(logits_NV: Tensor, *rest: object) -> Tensor:
            with torch.utils._python_dispatch._disable_current_modes():
                found = function(logits_NV, *rest)
            counted.bytes += logits_NV.nbytes * 2
            return found

        return run

    head.is_compiled = compiled
    with patch.object(fused_head, "_compiled", fused), counted:
        logp_N, _entropy_N = head(hidden_NH, torch.arange(tokens), "value")
        logp_N.sum().backward()
    return counted.bytes / (tokens * vocabulary)


def main() -> None:
    """Print a line for each way."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    init_process_group()
    rows: list[Sequence[object]] = []
    rows.append(("plain, attention by sequence", f"{operations(False, one_call_a_row=False):,}", ""))
    for name, compiled in (("plain", False), ("compiled", True)):
        rows.append((name, f"{operations(compiled):,}", f"{traffic(compiled):.0f}"))
    show(("layers and head", "operations of an update", "bytes of the head for each logit"), rows)


if __name__ == "__main__":
    main()
