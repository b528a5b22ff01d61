"""Decoder layers compiled by torch.compile (`execution.compile`).

What surrounds attention is compiled: norms, rotations, projections, MLP. Attention is left out: it has kernels of its
own, and would be compiled again for the bounds of every packed micro-batch. So are the output head, the losses and
generation.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from luffy.config.execution import ExecutionConfig
from luffy.errors import ConfigError, DataError

_LEFT_OUT: set[str] = set()
"""Names in transformers' attention interface whose functions compiled layers call uncompiled."""


def compile_layers(causal_lm: PreTrainedModel, execution: ExecutionConfig) -> None:
    """Compile the decoder layers in place if `execution.compile` says so, on the device where the model is now.

    Batch sizes are dynamic. Layers of one kind share the compiled code, which torch caches on disk. Names of parameters
    do not change. Raises ConfigError where torch cannot compile or must not, DataError for a model that does not
    declare its layers.
    """
    if not execution.compile:
        return
    _check_enabled()
    for layer in _layers(causal_lm):
        layer.compile(dynamic=True)
    _leave_attention_out(causal_lm.config._attn_implementation)
    # A batch size of 1 is compiled as a constant, which only packing, with its single row, may use.
    _try(causal_lm, rows=1 if execution.packing else 2)


@contextmanager
def without_compiled_layers(execution: ExecutionConfig) -> Iterator[None]:
    """Run compiled layers as plain Python for the length of the context."""
    if not execution.compile:  # torch would load its compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _check_enabled() -> None:
    """Raise ConfigError where torch.compile would do nothing."""
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            raise ConfigError(f"execution.compile: {name}=1 turns torch.compile off; unset it, or use compile: false")


def _layers(causal_lm: PreTrainedModel) -> list[nn.Module]:
    """The layers that transformers never splits over devices."""
    kinds = set(causal_lm._no_split_modules or ())
    layers = [module for module in causal_lm.get_decoder().modules() if type(module).__name__ in kinds]
    if not layers:
        raise DataError(f"execution.compile: {type(causal_lm).__name__} does not name its layers; use compile: false")
    return layers


def _leave_attention_out(name: str) -> None:
    if name not in _LEFT_OUT:
        AttentionInterface.register(name, torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name]))
        _LEFT_OUT.add(name)


def _try(causal_lm: PreTrainedModel, rows: int) -> None:
    """Run a forward pass, so that a missing compiler is reported in one line at the start."""
    from torch._dynamo.exc import TorchDynamoException  # takes seconds

    place_BT = torch.arange(8, device=causal_lm.device).expand(rows, 8)
    try:
        with torch.random.fork_rng():  # dropout draws from the generators that training continues with
            causal_lm.get_decoder()(
                input_ids=place_BT % causal_lm.config.vocab_size, position_ids=place_BT, use_cache=False
            )
    except TorchDynamoException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"execution.compile: torch cannot compile {type(causal_lm).__name__} here ({reason}); if there is no C++ "
            "compiler, install one (Debian: apt-get install g++), or use compile: false"
        ) from error
