"""Tests that need one NVIDIA GPU: `make test-gpu`. Without one they are skipped."""

import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def gpu() -> str:
    """The name of the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    gc.collect()  # the engines of the test before are in reference cycles, and would count in the peak of this one
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.get_device_name()
