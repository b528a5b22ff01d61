"""Peak throughput of GPUs by name: dense bfloat16 with float32 accumulation, as in NVIDIA's data sheets.

Used for model FLOPs utilisation, which divides by this peak whatever the compute type is.
"""

import re

_TERA = 1e12
_PEAKS_TFLOPS = (
    # The first pattern that matches counts, so the variants of a chip come before it.
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


def peak_flops(gpu_name: str) -> float | None:
    """Operations per second of the GPU that torch calls `gpu_name`; None for one that is not in the table."""
    found = (tflops * _TERA for pattern, tflops in _PEAKS_TFLOPS if re.search(pattern, gpu_name))
    return next(found, None)
