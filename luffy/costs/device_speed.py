"""Peak speed of this process's device, relative to which utilisation is reported."""

import time

import torch

from luffy.config.model import DType
from luffy.pipeline.machine.peak_flops import peak_flops

_SIZE = {"cpu": 2048, "cuda": 8192}
_TRIES = 3


def device_speed(dtype: DType) -> tuple[str, float, str]:
    """Name of the device, its operations per second, and where that number comes from.

    A GPU's number is that of the table for bfloat16. For a CPU, or a GPU that is not in the table, it is the fastest of
    three products of square matrices of `dtype` in this process, after one to warm up.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    peak = peak_flops(name) if kind == "cuda" else None
    if peak is not None:
        return name, peak, "its data sheet, bfloat16"
    speed = max(_matmul_flops(kind, getattr(torch, dtype)) for _ in range(_TRIES))
    return name, speed, f"a product of {dtype} matrices, measured in the same process"


def _matmul_flops(kind: str, dtype: torch.dtype) -> float:
    size = _SIZE[kind]
    matrix = torch.ones(size, size, dtype=dtype, device=kind)
    _timed(matrix)
    return 2 * size**3 / _timed(matrix)


def _timed(matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began
