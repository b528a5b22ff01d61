"""What a rank measures in training: metrics of an update, times of its parts, memory, floating-point operations.

Operations are counted from the model's shape, after PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): a token
costs 6 N + 12 L H Q T, for N weights of matrix products, L layers of H heads with Q dimensions, and a sequence of T
tokens. A third of that is the forward pass (2 N + 4 L H Q T), and two thirds are the backward pass. As there, causal
attention is counted like full attention, and what is computed twice (gradient checkpointing, the head's logits) counts
once. Two departures: the output embeddings count at the tokens that are scored, since `LogProbHead` computes no others;
the input embeddings are looked up and never count. Biases, norms and softmax, together below one per cent, are left
out. With a LoRA adapter the weights are frozen: the backward pass passes gradients through them and computes none of
them, so they cost 4 N operations a token instead of 6 N, and the adapter's A weights another 6 A.

Shape legend: `K` objective terms, `B` rows, `T` tokens, `N` selected tokens.
"""

import functools
import logging
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from luffy.config.terms import CustomLoss, DivergenceLoss, TermConfig
from luffy.model_shape import ModelArchitecture, from_model_config
from luffy.objectives.losses import TokenBatch, at_temperature, log_sampler_over_teacher
from luffy.objectives.objective import LossOutput, logp_gradients, passes, select
from luffy.processes import peak_memory_bytes
from luffy.training.ranks import device, sum_over_ranks
from luffy.types import TrainBatch

logger = logging.getLogger(__name__)
_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_DECADES = (-8, 3)
_BINS_PER_DECADE = 25
_EDGES = torch.logspace(*_DECADES, (_DECADES[1] - _DECADES[0]) * _BINS_PER_DECADE + 1, dtype=torch.float64)
"""A logarithmic grid for histograms, whose quantiles do not depend on the split into micro-batches or ranks."""
_MEANS = (
    "actor/entropy_on_policy",
    "actor/entropy_off_policy",
    "actor/on_policy_prob",
    "actor/off_policy_prob",
    "actor/approx_kl",
    "actor/off_policy_gradient_share",
    "actor/off_policy_weight_mean",
    "actor/clip_fraction",
    "rollout/logp_gap_mean",
    "rollout/prob_gap_mean",
)


def _has_limits(term: TermConfig) -> bool:
    """Whether the tokens that a policy-gradient term clips are known: not those of a loss of the user's own."""
    return term.is_policy_gradient and not isinstance(term.loss, CustomLoss)


def _is_taught(term: TermConfig) -> bool:
    """Whether a term compares the policy with a teacher."""
    return term.needs_teacher and not isinstance(term.loss, CustomLoss)


class UpdateMetrics:
    """Accumulates the metrics of an optimizer step; those without any tokens are left out, never 0 or NaN.

    Every rank has the same names in the same order, whatever its rows, since they are summed over ranks. Sums stay on
    the device until `summary`: a GPU is not waited for between micro-batches.
    """

    def __init__(self, terms: Sequence[TermConfig], teachers: Sequence[str] = ()) -> None:
        self._terms, self._teachers = terms, teachers
        names = list(_MEANS)
        for term in terms:
            names += [f"actor/{term.name}_entropy"]
            names += [f"actor/{term.name}_gated_fraction"] if term.gate is not None else []
            names += [f"actor/{term.name}_reverse_kl"] if _is_taught(term) else []
            names += [f"actor/{term.name}_teacher_rest"] if isinstance(term.loss, DivergenceLoss) else []
            names += [f"actor/{term.name}_clip_fraction"] if _has_limits(term) else []
        self._edges = _EDGES.to(device())
        self._means = {name: self._zeros(2) for name in names}
        """Sum and count."""
        histograms = [f"actor/{term.name}_weight" for term in terms if term.is_policy_gradient] + ["rollout/logp_gap"]
        self._counts = {name: self._zeros(len(_EDGES) + 1) for name in histograms}
        self._term_K = self._zeros(len(terms))

    @torch.no_grad()
    def add(self, micro: TrainBatch, tokens: TokenBatch, weight_KBT: Tensor, output: LossOutput) -> None:
        self._term_K += output.term_K.detach()
        off_BT, on_BT = select(micro, "off_policy"), select(micro, "on_policy")
        prob_BT = tokens.logp_BT.exp()
        self._mean("actor/entropy_on_policy", tokens.entropy_BT, on_BT)
        self._mean("actor/entropy_off_policy", tokens.entropy_BT, off_BT)
        self._mean("actor/on_policy_prob", prob_BT, on_BT)
        self._mean("actor/off_policy_prob", prob_BT, off_BT)
        self._mean("actor/approx_kl", tokens.logp_old_BT - tokens.logp_BT, on_BT)
        known_BT = on_BT & ~tokens.logp_behavior_BT.isnan()
        gap_BT = (tokens.logp_old_BT - tokens.logp_behavior_BT).abs()
        prob_gap_BT = (tokens.logp_old_BT.exp() - tokens.logp_behavior_BT.exp()).abs()
        self._mean("rollout/logp_gap_mean", gap_BT, known_BT)
        self._mean("rollout/prob_gap_mean", prob_gap_BT, known_BT)
        self._count("rollout/logp_gap", gap_BT, known_BT)
        gradient_KBT = logp_gradients(self._terms, tokens, weight_KBT)
        # Share of the gradient with respect to log-probabilities that falls on off-policy tokens.
        size_BT = gradient_KBT.sum(dim=0).abs().double()
        pair = torch.stack([torch.where(micro.is_off_policy_BT, size_BT, 0.0).sum(), size_BT.sum()])
        self._means["actor/off_policy_gradient_share"] += pair
        by_term = zip(self._terms, weight_KBT, gradient_KBT, output.limited_KBT, strict=True)
        for term, weight_BT, gradient_BT, limited_BT in by_term:
            selected_BT = weight_BT != 0
            if term.gate is not None:
                shut_BT, own_BT = ~passes(micro, term.gate, self._teachers), select(micro, term.select)
                self._mean(f"actor/{term.name}_gated_fraction", shut_BT, own_BT)
            self._mean(f"actor/{term.name}_entropy", at_temperature(tokens, term.loss).entropy_BT, selected_BT)
            if isinstance(term.loss, DivergenceLoss):
                self._mean(f"actor/{term.name}_teacher_rest", tokens.logq_BTC[..., -1].exp(), selected_BT)
            if _is_taught(term):
                self._mean(f"actor/{term.name}_reverse_kl", log_sampler_over_teacher(tokens), selected_BT)
            if not term.is_policy_gradient:
                continue
            if _has_limits(term):
                self._mean(f"actor/{term.name}_clip_fraction", limited_BT, selected_BT)
                self._mean("actor/clip_fraction", limited_BT, selected_BT)
            # Weight of grad log pi_theta at advantage 1: rho f'(rho) with policy shaping, r with the plain surrogate.
            signal_BT = weight_BT * tokens.advantage_BT.double()
            has_signal_BT = signal_BT != 0
            effective_BT = gradient_BT.double().abs() / torch.where(has_signal_BT, signal_BT.abs(), 1.0)
            self._count(f"actor/{term.name}_weight", effective_BT, has_signal_BT)
            self._mean("actor/off_policy_weight_mean", effective_BT, has_signal_BT & micro.is_off_policy_BT)

    def summary(self) -> dict[str, float]:
        """The metrics of the whole optimizer step over all ranks."""
        parts = [self._term_K, *self._means.values(), *self._counts.values()]
        term_K, *rest = sum_over_ranks(torch.cat(parts)).cpu().split([len(part) for part in parts])
        summary = {"actor/loss": float(term_K.sum())}
        summary |= {f"actor/{term.name}_loss": float(share) for term, share in zip(self._terms, term_K, strict=True)}
        for name, (total, count) in zip(self._means, rest, strict=False):
            if count > 0:
                summary[name] = float(total / count)
        for name, count_N in zip(self._counts, rest[len(self._means) :], strict=True):
            shares = {"p99": 0.99, "max": 1.0} if name == "rollout/logp_gap" else _QUANTILES
            summary |= {f"{name}_{label}": value for label, value in _quantiles(count_N, shares).items()}
        return summary

    def _mean(self, name: str, value_BT: Tensor, mask_BT: Tensor) -> None:
        total = torch.where(mask_BT, value_BT.double(), 0.0).sum()
        self._means[name] += torch.stack([total, mask_BT.sum().double()])

    def _count(self, name: str, value_BT: Tensor, mask_BT: Tensor) -> None:
        """Count a value in the bin below its edge; bin 0 is below the grid, the last one above it."""
        bin_N = torch.bucketize(value_BT.double().flatten(), self._edges)
        self._counts[name].index_add_(0, bin_N, mask_BT.double().flatten())

    def _zeros(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.float64, device=device())


def _quantiles(count_N: Tensor, shares: Mapping[str, float]) -> dict[str, float]:
    """The quantiles of a histogram at the given shares; empty for an empty histogram.

    A quantile is the upper edge of its bin, at most 10 % above the true one; values below the grid count as 0.
    """
    if not count_N.sum():
        return {}
    cumulative = count_N.cumsum(0) / count_N.sum()
    bins = {label: int(torch.searchsorted(cumulative, share)) for label, share in shares.items()}
    # The last bin is above the grid and is reported as the grid's upper end.
    return {label: float(_EDGES[min(bin_, len(_EDGES) - 1)]) if bin_ else 0.0 for label, bin_ in bins.items()}


_TERA = 1e12


class PartTimes:
    """Seconds of each part, and the operations that they took.

    A part on a GPU ends when the GPU has finished it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._flops = 0.0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def count(self, flops: float) -> None:
        """Add operations of this rank (`luffy.training.update_metrics`)."""
        self._flops += flops

    def metrics(self) -> dict[str, float]:
        """`perf/<part>_s`, `perf/model_tflops` and `perf/mfu`; a collective call.

        `model_tflops` is the mean over ranks of the counted operations, in 1e12 per second of all parts together.
        `mfu` is its share of the GPU's peak (`luffy.training.update_metrics`), left out without a known peak, so on
        every CPU.
        """
        total, num_ranks = sum_over_ranks(torch.tensor([self._flops, 1.0], dtype=torch.float64)).tolist()
        metrics = {f"perf/{name}_s": seconds for name, seconds in self.seconds.items()}
        seconds = sum(self.seconds.values())
        if not total or not seconds:  # a kind of model whose shape is not known, or nothing to learn from
            return metrics
        speed = total / num_ranks / seconds
        metrics["perf/model_tflops"] = speed / _TERA
        peak = device_peak()
        return metrics if peak is None else metrics | {"perf/mfu": speed / peak}


def device_peak() -> float | None:
    """Peak operations per second of this rank's GPU; None for a CPU and for a GPU that is not in the table."""
    return peak_flops(torch.cuda.get_device_name(device())) if torch.cuda.is_available() else None


_BYTES_A_GIB = 2**30


MOST_GRAPHS = 40
"""Graphs of one process above which sizes are compiled as constants that should not be. A model has four a layer kind
in training and four to score, twice as many where rows are padded, and the head has six; up to four models are
compiled (policy, reference, critic, teacher), of which the critic shares the policy's."""


def process_metrics() -> dict[str, float]:
    """Metrics of the stage in GiB: peak resident set size and, with a GPU, peak memory allocated by torch; and, where
    anything is compiled, `perf/compiled_graphs`, how many graphs torch has compiled so far. Warns when these become
    too many.

    They cover this process only; a step logs those of rank 0, which under Ray has no engine.
    """
    peak = {"perf/peak_memory_gib": peak_memory_bytes() / _BYTES_A_GIB}
    if torch.cuda.is_available():
        peak["perf/peak_gpu_memory_gib"] = torch.cuda.max_memory_allocated() / _BYTES_A_GIB
    compiler = sys.modules.get("torch._dynamo.utils")  # not imported here: it takes seconds
    num_graphs = 0 if compiler is None else compiler.counters["stats"]["unique_graphs"]
    if num_graphs > MOST_GRAPHS:
        _warn_of_graphs()
    return peak | ({"perf/compiled_graphs": float(num_graphs)} if num_graphs else {})


@functools.cache  # a process says it once
def _warn_of_graphs() -> None:
    logger.warning(
        "torch has compiled more than %d graphs: it compiles the same layers again and again, in the end not at all; "
        "use execution.compile: false (TORCH_LOGS=recompiles says why)",
        MOST_GRAPHS,
    )


_FORWARD = 2
_ATTENTION_FORWARD = 4
TRAINING = 3
"""A forward and a backward pass take three times the operations of the forward pass."""
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

    def forward(self, lengths: Sequence[int], num_scored: int) -> float:
        """Operations of a forward pass over sequences of `lengths` tokens, whose head scores `num_scored` of them.

        `num_scored` is 0 for a critic, which has no output embeddings.
        """
        adapter = _FORWARD * (self.adapter_weights or 0) * sum(lengths)
        per_pair = _ATTENTION_FORWARD * self.shape.num_layers * self.shape.attention_size
        attention = per_pair * sum(length**2 for length in lengths)
        return float(self._products(lengths, num_scored) + attention + adapter)

    def training(self, lengths: Sequence[int], num_scored: int) -> float:
        if self.adapter_weights is None:
            return TRAINING * self.forward(lengths, num_scored)
        return TRAINING * self.forward(lengths, num_scored) - self._products(lengths, num_scored)

    def _products(self, lengths: Sequence[int], num_scored: int) -> int:
        """Operations of the matrix products in a forward pass, without an adapter's; weight gradients take as many."""
        shape = self.shape
        attention = shape.hidden_size * (2 * shape.attention_size + 2 * shape.kv_size)
        decoder = shape.num_layers * (attention + 3 * shape.hidden_size * shape.intermediate_size)
        return _FORWARD * (decoder * sum(lengths) + shape.embedding_parameters * num_scored)


def peak_flops(gpu_name: str) -> float | None:
    """Operations per second of the GPU that torch calls `gpu_name`; None for one that is not in the table.

    Model FLOPs utilisation divides by this peak whatever the compute type is.
    """
    found = (tflops * _TERA for pattern, tflops in _PEAKS_TFLOPS if re.search(pattern, gpu_name))
    return next(found, None)
