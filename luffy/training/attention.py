"""How the decoder layers of models in training run: their attention and their compilation.

Attention is causal, each sequence by itself, and without a mask. Rows are padded on the right, where a causal model
never looks, and positions that are padding carry no loss. So padded rows need no mask. For packed rows a GPU's kernel
gets the start of each sequence, in one call a layer; a CPU attends sequence by sequence. With a mask, memory would grow
with the square of a micro-batch's tokens.

Layers are compiled by torch.compile (`execution.compile`), that is what surrounds attention: norms, rotations,
projections, MLP. Attention is left out: it has kernels of its own, and would be compiled again for the bounds of every
packed micro-batch. So are the losses and generation. The output head compiles its own passes (`fused_head`).

Shape legend: `B` rows, `T` tokens, `A` attention heads, `D` size of a head, `H` hidden size.
"""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as shape_config
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from luffy.config.execution import ExecutionConfig
from luffy.errors import ConfigError, DataError
from luffy.training.ranks import to_device

logger = logging.getLogger(__name__)
AttentionInputs: TypeAlias = Mapping[str, Tensor | int]
"""Further keyword arguments of a decoder, which it passes on to each of its attention layers."""
SDPA_BY_SEQUENCE = "sdpa_by_sequence"
"""The name of `attend_by_sequence` in transformers' attention interface."""
_BLOCK = 512
"""Queries that attend through a sliding window at the same time."""
_LEAK = 0.05
"""Relative difference of hidden states from which packed sequences count as mixed; bfloat16 rounds to about 0.01."""


def set_attention(causal_lm: PreTrainedModel, execution: ExecutionConfig) -> ExecutionConfig:
    """Let a model attend sequence by sequence where it can, on the device where it is now.

    Returns `execution`, with `packing` decided. Raises DataError where it is true for a model that has another kind of
    attention, or whose packed sequences would see each other.
    """
    if not _attends_plainly(causal_lm):
        if execution.packing:
            raise DataError(f"execution.packing: true does not support {type(causal_lm).__name__}; use packing: false")
        return _with(execution, packing=False)  # transformers' sdpa, with whatever masks this model needs
    causal_lm.set_attn_implementation(SDPA_BY_SEQUENCE)
    packed = _with(execution, packing=True)
    is_packed = _has_one_call(causal_lm) if execution.packing is None else execution.packing
    if is_packed and _mixes_sequences(causal_lm, packed):
        if execution.packing:
            raise DataError(
                f"execution.packing: the packed sequences of {type(causal_lm).__name__} see each other; use packing: "
                "false"
            )
        is_packed = False
    return packed if is_packed else _with(execution, packing=False)


def _with(execution: ExecutionConfig, **decided: bool) -> ExecutionConfig:
    return execution.model_copy(update=decided)


def _has_one_call(causal_lm: PreTrainedModel) -> bool:
    """Whether all sequences of a packed row attend in one call."""
    config = causal_lm.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = torch.empty(size, dtype=causal_lm.dtype, device=causal_lm.device)
    return has_packed_kernel(head, head)


@contextmanager
def attention_for_generation(causal_lm: PreTrainedModel) -> Iterator[None]:
    """transformers' own sdpa for the length of the context: generation has a cache, and rows padded on the left."""
    own = causal_lm.config._attn_implementation
    causal_lm.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        causal_lm.set_attn_implementation(own)


def attention_inputs(position_ids_BT: Tensor, execution: ExecutionConfig) -> AttentionInputs:
    """Where the sequences of a packed micro-batch begin and end; empty for padded rows.

    Each sequence begins at position 0. The positions are best on the CPU: then no GPU is waited for.
    """
    if not execution.packing:
        return {}
    starts = (position_ids_BT.flatten() == 0).nonzero().flatten().to(torch.int32).cpu()
    on_cpu = torch.cat([starts, starts.new_tensor([position_ids_BT.numel()])])
    bounds, longest = to_device(on_cpu), int(on_cpu.diff().max())
    return {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
        "sequence_bounds": on_cpu,
    }


def attend_by_sequence(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sequence_bounds: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention over `(B, A, T, D)`, returned as `(B, T, A, D)`; an entry of transformers' attention interface.

    The sequences of a packed row attend in one call where torch has the kernel, otherwise one by one. `sequence_bounds`
    on the CPU, and `cu_seq_lens_q` on the device, have the start of each and the end of the last; `max_length_q` is the
    longest. Raises DataError for a model that caps its attention scores.
    """
    if softcap is not None:
        raise DataError("model.path: the model caps its attention scores, which training does not support")
    assert attention_mask is None and query.shape[2] == key.shape[2], "training has neither a mask nor a cache"
    if cu_seq_lens_q is not None and dropout == 0.0 and has_packed_kernel(query, value):
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        starts, longest = cu_seq_lens_q, max_length_q
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        found_TAD = varlen_attn(
            queries, keys, values, starts, starts, longest, longest, scale=scaling, window_size=window, enable_gqa=True
        )
        assert isinstance(found_TAD, Tensor)
        return found_TAD.unsqueeze(0), None
    lengths = [query.shape[2]] if sequence_bounds is None else sequence_bounds.diff().tolist()
    found = [
        _attend(*parts, window=sliding_window, dropout=dropout, scale=scaling).transpose(1, 2)
        for parts in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    ]
    return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).contiguous(), None


def has_packed_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention takes them: 16-bit, on a GPU from Ampere on, heads of one size of up to 256."""
    return (
        query.is_cuda
        and query.shape[-1] == value.shape[-1]
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _attend(query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout: float, scale: float) -> Tensor:
    """One sequence, or rows of equal width."""
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=dropout, scale=scale, enable_gqa=groups > 1
        )
    # CUDA's kernels do not take fewer key heads together with a bias.
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    blocks = []
    for start in range(0, length, _BLOCK):
        end, first = min(start + _BLOCK, length), max(start - window + 1, 0)
        # A query sees its own position and the `window - 1` before it.
        back = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        outside = (back < 0) | (back >= window)
        del back  # freed before the kernel allocates
        bias = torch.zeros(outside.shape, dtype=query.dtype, device=query.device).masked_fill_(outside, -torch.inf)
        del outside
        blocks.append(
            F.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=bias,
                dropout_p=dropout,
                scale=scale,
            )
        )
    return torch.cat(blocks, dim=2)


# transformers makes no mask for an implementation that its interface of masks does not know, and drops one that it is
# given: rows padded on the left need `attention_for_generation`.
AttentionInterface.register(SDPA_BY_SEQUENCE, attend_by_sequence)


def _attends_plainly(causal_lm: PreTrainedModel) -> bool:
    """Whether the model uses transformers' attention interface, with causal or sliding-window attention only."""
    kinds = set(getattr(causal_lm.config, "layer_types", None) or ())
    chunked = getattr(causal_lm.config, "attention_chunk_size", None) is not None
    return causal_lm._can_set_attn_implementation() and kinds <= {"full_attention", "sliding_attention"} and not chunked


@torch.no_grad()
def _mixes_sequences(causal_lm: PreTrainedModel, execution: ExecutionConfig) -> bool:
    """Whether a sequence's hidden states depend on the one packed before it, as in recurrent layers."""
    was_training = causal_lm.training
    causal_lm.eval()
    ids_1T = (torch.arange(12, device=causal_lm.device) % causal_lm.config.vocab_size).unsqueeze(0)
    packed_1T = torch.cat([torch.arange(8), torch.arange(4)]).to(causal_lm.device).unsqueeze(0)
    together, alone = (
        causal_lm.get_decoder()(
            input_ids=ids, position_ids=positions, use_cache=False, **attention_inputs(positions, execution)
        ).last_hidden_state[:, -4:].float()
        for ids, positions in ((ids_1T, packed_1T), (ids_1T[:, -4:], packed_1T[:, -4:]))
    )  # fmt: skip
    causal_lm.train(was_training)
    return bool((together - alone).norm() > _LEAK * alone.norm())


_LEFT_OUT: set[str] = set()
"""Names in transformers' attention interface whose functions compiled layers call uncompiled."""


def compile_layers(causal_lm: PreTrainedModel, execution: ExecutionConfig) -> ExecutionConfig:
    """Compile the decoder layers in place if `execution.compile` says so, on the device where the model is now.

    Returns `execution`, with `compile` decided; `packing` already is. Batch sizes are dynamic. Layers of one kind share
    the compiled code, which torch caches on disk. Names of parameters do not change. Where `execution.compile` is true,
    raises ConfigError if torch cannot compile or must not, DataError for a model that does not declare its layers.
    """
    plain = _with(execution, compile=False)
    if execution.compile is False:
        return plain
    if execution.compile is None and (causal_lm.device.type != "cuda" or execution.uncompiled_with is not None):
        return plain
    try:
        _compile(causal_lm, execution)
    except (ConfigError, DataError) as error:
        if execution.compile:
            raise
        logger.warning("layers run uncompiled. %s", error)
        return plain
    return _with(execution, compile=True)


def _compile(causal_lm: PreTrainedModel, execution: ExecutionConfig) -> None:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):  # torch.compile would do nothing
        if os.environ.get(name) == "1":
            raise ConfigError(f"execution.compile: {name}=1 turns torch.compile off; unset it, or use compile: false")
    kinds = set(causal_lm._no_split_modules or ())  # the layers that transformers never splits over devices
    layers = [module for module in causal_lm.get_decoder().modules() if type(module).__name__ in kinds]
    if not layers:
        raise DataError(f"execution.compile: {type(causal_lm).__name__} does not name its layers; use compile: false")
    # A width that is equal to a number of heads by chance would be compiled as that number.
    shape_config.use_duck_shape = False
    for layer in layers:
        layer.compile(dynamic=True)
    attention = causal_lm.config._attn_implementation
    if attention not in _LEFT_OUT:
        AttentionInterface.register(attention, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[attention]))
        _LEFT_OUT.add(attention)
    # A forward pass, so that a missing compiler is reported in one line at the start.
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    # As in training, so that this compiles nothing that is not used again. A batch size of 1 is compiled as a constant,
    # which packing alone has always.
    place_BT = torch.arange(8).repeat(1, 2) if execution.packing else torch.arange(8).repeat(2, 1)
    inputs, place_BT = attention_inputs(place_BT, execution), to_device(place_BT)
    try:
        # Dropout draws from the generators that training continues with.
        with torch.random.fork_rng(), torch.set_grad_enabled(causal_lm.training):
            causal_lm.get_decoder()(
                input_ids=place_BT % causal_lm.config.vocab_size, position_ids=place_BT, use_cache=False, **inputs
            )
    except TorchDynamoException as error:
        for layer in layers:
            layer._compiled_call_impl = None
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"execution.compile: torch cannot compile {type(causal_lm).__name__} here ({reason}); if there is no C++ "
            "compiler, install one (Debian: apt-get install g++), or use compile: false"
        ) from error


@contextmanager
def without_compiled_layers(execution: ExecutionConfig) -> Iterator[None]:
    """Run compiled layers as plain Python for the length of the context."""
    if not execution.compile:  # torch would load its compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
