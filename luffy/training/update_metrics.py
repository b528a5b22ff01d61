"""What a rank measures in training: metrics of an update, times of its parts, and memory.

Shape legend: `K` objective terms, `B` rows, `T` tokens, `N` selected tokens.
"""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from luffy.config.terms import DistillationLoss, TermConfig
from luffy.objectives.inspection import limited, logp_gradients
from luffy.objectives.losses import TokenBatch, at_temperature, log_sampler_over_teacher
from luffy.objectives.normalisation import SumOverRanks, passes, select
from luffy.objectives.objective import LossOutput
from luffy.training.flops import peak_flops
from luffy.training.ranks import device, sum_over_ranks
from luffy.types import TrainBatch

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_DECADES = (-8, 3)
_BINS_PER_DECADE = 25


class UpdateMetrics:
    """Accumulates (sum, count) pairs and histograms; metrics without any tokens are left out, never 0 or NaN.

    Every rank has the same names in the same order, whatever its rows, since they are summed over ranks.
    """

    def __init__(self, terms: Sequence[TermConfig]) -> None:
        self._terms = terms
        self._term_K = torch.zeros(len(terms), dtype=torch.float64)
        names = list(_POLICY_MEANS)
        for term in terms:
            names += [f"actor/{term.name}_entropy"]
            names += [f"actor/{term.name}_gated_fraction"] if term.gate is not None else []
            names += [f"actor/{term.name}_reverse_kl"] if isinstance(term.loss, DistillationLoss) else []
            names += [f"actor/{term.name}_clip_fraction"] if term.is_policy_gradient else []
        self._means = {name: torch.zeros(2, dtype=torch.float64) for name in names}
        self._weights = {term.name: _LogHistogram() for term in terms if term.is_policy_gradient}
        self._logp_gap = _LogHistogram()

    @torch.no_grad()
    def add(self, micro: TrainBatch, tokens: TokenBatch, weight_KBT: Tensor, output: LossOutput) -> None:
        """Add one micro-batch."""
        self._term_K += output.term_K.detach().double().cpu()
        self._add_policy(micro, tokens)
        gradient_KBT = logp_gradients(self._terms, tokens, weight_KBT)
        # Share of the gradient with respect to log-probabilities that falls on off-policy tokens.
        size_BT = gradient_KBT.sum(dim=0).abs().double()
        pair = torch.stack([size_BT[micro.is_off_policy_BT].sum(), size_BT.sum()])
        self._means["actor/off_policy_gradient_share"] += pair.cpu()
        for term, weight_BT, gradient_BT in zip(self._terms, weight_KBT, gradient_KBT, strict=True):
            self._add_term(term, micro, tokens, weight_BT, gradient_BT)

    def summary(self, sum_over_ranks: SumOverRanks) -> dict[str, float]:
        """The metrics of the whole optimizer step over all ranks."""
        term_K = sum_over_ranks(self._term_K)
        summary = {"actor/loss": float(term_K.sum())}
        summary |= {f"actor/{term.name}_loss": float(share) for term, share in zip(self._terms, term_K, strict=True)}
        for name, pair in self._means.items():
            total, count = sum_over_ranks(pair)
            if count > 0:
                summary[name] = float(total / count)
        for name, histogram in self._weights.items():
            quantiles = histogram.quantiles(sum_over_ranks, _QUANTILES)
            summary |= {f"actor/{name}_weight_{label}": value for label, value in quantiles.items()}
        gaps = self._logp_gap.quantiles(sum_over_ranks, {"p99": 0.99, "max": 1.0})
        return summary | {f"rollout/logp_gap_{label}": value for label, value in gaps.items()}

    def _add_policy(self, micro: TrainBatch, tokens: TokenBatch) -> None:
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
        self._logp_gap.add(gap_BT[known_BT].double())

    def _add_term(
        self, term: TermConfig, micro: TrainBatch, tokens: TokenBatch, weight_BT: Tensor, gradient_BT: Tensor
    ) -> None:
        selected_BT = weight_BT != 0
        if term.gate is not None:
            shut_BT, own_BT = ~passes(micro, term.gate), select(micro, term.select)
            self._mean(f"actor/{term.name}_gated_fraction", shut_BT, own_BT)
        self._mean(f"actor/{term.name}_entropy", at_temperature(tokens, term.loss).entropy_BT, selected_BT)
        if isinstance(term.loss, DistillationLoss):
            self._mean(f"actor/{term.name}_reverse_kl", log_sampler_over_teacher(tokens), selected_BT)
        if not term.is_policy_gradient:
            return
        limited_BT = limited(tokens, term, selected_BT)
        self._mean(f"actor/{term.name}_clip_fraction", limited_BT, selected_BT)
        self._mean("actor/clip_fraction", limited_BT, selected_BT)
        # Weight of grad log pi_theta at advantage 1: rho f'(rho) with policy shaping, r with the plain surrogate.
        signal_BT = weight_BT * tokens.advantage_BT.double()
        has_signal_BT = signal_BT != 0
        effective_BT = gradient_BT.double().abs() / torch.where(has_signal_BT, signal_BT.abs(), 1.0)
        self._weights[term.name].add(effective_BT[has_signal_BT])
        self._mean("actor/off_policy_weight_mean", effective_BT, has_signal_BT & micro.is_off_policy_BT)

    def _mean(self, name: str, value_BT: Tensor, mask_BT: Tensor) -> None:
        selected_N = value_BT[mask_BT].double().cpu()
        self._means[name] += torch.stack([selected_N.sum(), torch.tensor(float(len(selected_N)), dtype=torch.float64)])


_POLICY_MEANS = (
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


class _LogHistogram:
    """A histogram on a fixed logarithmic grid, whose quantiles do not depend on the split into micro-batches or ranks.

    A quantile is the upper edge of its bin, at most 10 % above the true one; values below the grid count as 0.
    """

    def __init__(self) -> None:
        low, high = _DECADES
        self._edges = torch.logspace(low, high, (high - low) * _BINS_PER_DECADE + 1, dtype=torch.float64)
        self._counts = torch.zeros(len(self._edges) + 1, dtype=torch.float64)

    def add(self, value_N: Tensor) -> None:
        index_N = torch.bucketize(value_N.cpu(), self._edges)
        self._counts += torch.bincount(index_N, minlength=len(self._counts)).double()

    def quantiles(self, sum_over_ranks: SumOverRanks, shares: Mapping[str, float]) -> dict[str, float]:
        """The quantiles at the given shares; empty for an empty histogram."""
        counts = sum_over_ranks(self._counts)
        if not counts.sum():
            return {}
        cumulative = counts.cumsum(0) / counts.sum()
        upper = torch.cat([torch.zeros(1, dtype=torch.float64), self._edges])
        # Bin 0 is below the grid; the last one is above it and is reported as the grid's upper end.
        return {
            label: float(upper[min(int(torch.searchsorted(cumulative, share)) + 1, len(self._edges))])
            if int(torch.searchsorted(cumulative, share))
            else 0.0
            for label, share in shares.items()
        }


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
        """Add the time in this context to the part `name`."""
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def count(self, flops: float) -> None:
        """Add operations of this rank (`luffy.training.flops`)."""
        self._flops += flops

    def metrics(self) -> dict[str, float]:
        """`perf/<part>_s`, `perf/model_tflops` and `perf/mfu`; a collective call.

        `model_tflops` is the mean over ranks of the counted operations, in 1e12 per second of all parts together.
        `mfu` is its share of the GPU's peak (`luffy.training.flops`), left out without a known peak, so on
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


_KIB_A_GIB = 2**20
_BYTES_A_GIB = 2**30


def peak_memory() -> dict[str, float]:
    """Metrics in GiB: peak resident set size and, with a GPU, peak memory allocated by torch.

    They cover this process only; a step logs those of rank 0, which under Ray has no engine.
    """
    peak = {"perf/peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / _KIB_A_GIB}
    if torch.cuda.is_available():
        peak["perf/peak_gpu_memory_gib"] = torch.cuda.max_memory_allocated() / _BYTES_A_GIB
    return peak
