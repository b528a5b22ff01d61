"""How long the parts of training in a step take on this rank, and how well they use its device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from luffy.pipeline.machine.peak_flops import peak_flops
from luffy.training.ranks import device, sum_over_ranks

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
        """Add operations of this rank (`luffy.pipeline.machine.flops`)."""
        self._flops += flops

    def metrics(self) -> dict[str, float]:
        """`perf/<part>_s`, `perf/model_tflops` and `perf/mfu`; a collective call.

        `model_tflops` is the mean over ranks of the counted operations, in 1e12 per second of all parts together.
        `mfu` is its share of the GPU's peak (`luffy.pipeline.machine.peak_flops`), left out without a known peak, so on
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
