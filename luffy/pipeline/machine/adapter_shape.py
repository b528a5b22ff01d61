"""Size of a LoRA adapter: its layers, parameters and activations, computed from the model's shape alone."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass

from luffy.config.model import LoRAConfig
from luffy.pipeline.machine.architecture import ModelArchitecture


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer inside the decoder."""

    name: str
    num_inputs: int
    num_outputs: int


def missing_package() -> str | None:
    """One line for the user if peft is not installed, else None."""
    if importlib.util.find_spec("peft") is not None:
        return None
    return "model.lora needs the package peft: pip install 'luffy-rl[lora]'"


def linear_layers(architecture: ModelArchitecture) -> Iterator[LinearLayer]:
    """The linear layers of all decoder layers, by their names in the model."""
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, architecture.attention_size),
        "self_attn.k_proj": (hidden, architecture.kv_size),
        "self_attn.v_proj": (hidden, architecture.kv_size),
        "self_attn.o_proj": (architecture.attention_size, hidden),
        "mlp.gate_proj": (hidden, intermediate),
        "mlp.up_proj": (hidden, intermediate),
        "mlp.down_proj": (intermediate, hidden),
    }
    for layer in range(architecture.num_layers):
        for name, (num_inputs, num_outputs) in shapes.items():
            yield LinearLayer(f"model.layers.{layer}.{name}", num_inputs, num_outputs)


def adapted_layers(architecture: ModelArchitecture, lora: LoRAConfig) -> list[LinearLayer]:
    """The layers that get an adapter."""
    return [layer for layer in linear_layers(architecture) if lora.adapts(layer.name)]


def adapter_parameters(architecture: ModelArchitecture, lora: LoRAConfig) -> int:
    """Number of parameters of the adapter: `rank` times the inputs and outputs of each adapted layer."""
    layers = adapted_layers(architecture, lora)
    return lora.rank * sum(layer.num_inputs + layer.num_outputs for layer in layers)


def adapter_activation_bytes(architecture: ModelArchitecture, lora: LoRAConfig, dtype_bytes: int) -> tuple[int, int]:
    """Bytes per token that the adapters of all layers save for the backward pass, and the peak that one layer adds.

    An adapted layer saves `A x`, b r, besides what it saves without; with dropout also the input to `A` and the mask,
    (b + 1) times the inputs. In the backward pass it adds the adapter's gradient of its input to the layer's own.
    """
    layers = adapted_layers(architecture, lora)
    products = len(layers) * dtype_bytes * lora.rank
    dropped = sum(layer.num_inputs for layer in layers) * (dtype_bytes + 1) if lora.dropout else 0
    widest = max((max(layer.num_inputs, layer.num_outputs) for layer in layers), default=0)
    return products + dropped, dtype_bytes * widest
