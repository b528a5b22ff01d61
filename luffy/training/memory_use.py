"""Peak memory use of this process."""

import resource

import torch

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
