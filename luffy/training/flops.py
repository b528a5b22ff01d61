"""The floating-point operations that training a model takes, counted from its shape, and the peak of its GPU.

After PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): a token costs 6 N + 12 L H Q T operations, for N weights of
matrix products, L layers of H heads with Q dimensions, and a sequence of T tokens. A third of that is the forward pass
(2 N + 4 L H Q T), and two thirds are the backward pass. As there, causal attention is counted like full attention, and
what is computed twice (gradient checkpointing, the head's logits) counts once.

Two departures. The output embeddings count at the tokens that are scored, since `LogProbHead` computes no others; the
input embeddings are looked up and never count. Biases, norms and softmax, together below one per cent, are left out.

With a LoRA adapter the weights are frozen: the backward pass passes gradients through them and computes none of them,
so they cost 4 N operations a token instead of 6 N, and the adapter's A weights another 6 A.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from luffy.model_shape import ModelArchitecture, from_model_config

_FORWARD = 2
_ATTENTION_FORWARD = 4
TRAINING = 3
"""A forward and a backward pass take three times the operations of the forward pass."""
_TERA = 1e12
_PEAKS_TFLOPS = (
    (r"\b(GB200|B200)\b", 2250.0),
    (r"\b(GH200|H200)\b", 989.4),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\b(H100|H800)\b", 989.4),
    (r"\bH20\b", 148.0),
    (r"\b(A100|A800)\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA30\b", 165.0),
    (r"\bA40\b", 149.7),
    (r"\bA10\b", 125.0),
)
"""Dense bfloat16 with float32 accumulation, as in NVIDIA's data sheets; the first pattern that matches counts."""


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Counts the operations of one model."""

    shape: ModelArchitecture
    adapter_weights: int | None = None
    """Number of weights of the adapter, if only that is trained; None: the whole model is trained."""

    @classmethod
    def of_config(cls, config: Mapping[str, object], adapter_weights: int | None = None) -> "ModelFlops | None":
        """The counter for a model with this `config.json`; None for a model type that is not supported here."""
        shape = from_model_config(config)
        return None if shape is None else cls(shape, adapter_weights)

    def without_adapter(self) -> "ModelFlops":
        """The same model, trained as a whole."""
        return replace(self, adapter_weights=None)

    @property
    def decoder_weights(self) -> int:
        """Weights of the matrix products in all layers."""
        shape = self.shape
        attention = shape.hidden_size * (2 * shape.attention_size + 2 * shape.kv_size)
        return shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)

    def forward(self, lengths: Sequence[int], num_scored: int) -> float:
        """Operations of a forward pass over sequences of `lengths` tokens, whose head scores `num_scored` of them.

        `num_scored` is 0 for a critic, which has no output embeddings.
        """
        adapter = _FORWARD * (self.adapter_weights or 0) * sum(lengths)
        per_pair = _ATTENTION_FORWARD * self.shape.num_layers * self.shape.attention_size
        attention = per_pair * sum(length**2 for length in lengths)
        return float(self._products(lengths, num_scored) + attention + adapter)

    def training(self, lengths: Sequence[int], num_scored: int) -> float:
        """Operations of a forward and a backward pass."""
        if self.adapter_weights is None:
            return TRAINING * self.forward(lengths, num_scored)
        return TRAINING * self.forward(lengths, num_scored) - self._products(lengths, num_scored)

    def _products(self, lengths: Sequence[int], num_scored: int) -> int:
        """Operations of the matrix products in a forward pass, without an adapter's; weight gradients take as many."""
        return _FORWARD * (self.decoder_weights * sum(lengths) + self.shape.embedding_parameters * num_scored)


def peak_flops(gpu_name: str) -> float | None:
    """Operations per second of the GPU that torch calls `gpu_name`; None for one that is not in the table.

    Model FLOPs utilisation divides by this peak whatever the compute type is.
    """
    found = (tflops * _TERA for pattern, tflops in _PEAKS_TFLOPS if re.search(pattern, gpu_name))
    return next(found, None)
