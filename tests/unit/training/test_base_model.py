"""The starting policy's folder."""

import json
from pathlib import Path

import pytest
import torch
from reference.gradient_case import tiny_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from luffy.config.model import ModelConfig
from luffy.errors import DataError
from luffy.training.model_folder import adapt_model_folder, load_causal_lm


def test_adapting_a_folder_changes_its_configuration_and_keeps_its_weights(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.temperature = 0.3
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "given")
    before = {file.name: file.read_bytes() for file in (tmp_path / "given").iterdir()}
    config = ModelConfig(path=str(tmp_path / "given"), rope_theta=40000.0, max_position_embeddings=256)
    for _ in range(2):  # again after a kill
        adapt_model_folder(config, tmp_path / "model")
    adapted = load_causal_lm(tmp_path / "model", "float32")
    assert adapted.config.max_position_embeddings == 256
    assert adapted.config.rope_parameters["rope_theta"] == 40000.0
    assert torch.equal(adapted.lm_head.weight, model.lm_head.weight)
    assert not (tmp_path / "model/generation_config.json").exists()
    assert {file.name: file.read_bytes() for file in (tmp_path / "given").iterdir()} == before


@pytest.mark.parametrize(
    "written", [{"rope_theta": 10000.0}, {"rope_parameters": None}], ids=["before transformers 5", "none"]
)
def test_the_base_of_the_rotations_may_be_written_as_before_transformers_5_or_missing(tmp_path: Path, written) -> None:
    tiny_model().save_pretrained(tmp_path / "given")
    file = tmp_path / "given/config.json"
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | written))
    adapt_model_folder(ModelConfig(path=str(tmp_path / "given"), rope_theta=4e4), tmp_path / "model")
    assert load_causal_lm(tmp_path / "model", "float32").config.rope_parameters["rope_theta"] == 4e4


def test_the_base_of_the_rotations_may_be_one_for_each_kind_of_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    gemma = Gemma3TextConfig(vocab_size=32, head_dim=8, num_hidden_layers=2, layer_types=None, **sizes)
    Gemma3ForCausalLM(gemma).save_pretrained(tmp_path / "given")
    adapt_model_folder(ModelConfig(path=str(tmp_path / "given"), rope_theta=4e4), tmp_path / "model")
    rope = json.loads((tmp_path / "model/config.json").read_text())["rope_parameters"]
    assert {kind: each["rope_theta"] for kind, each in rope.items()} == dict.fromkeys(
        ("full_attention", "sliding_attention"), 4e4
    )


def test_the_result_stays_as_it_was_when_the_given_file_is_written_again(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "given")
    adapt_model_folder(ModelConfig(path=str(tmp_path / "given")), tmp_path / "model")
    before = (tmp_path / "model/model.safetensors").read_bytes()
    with (tmp_path / "given/model.safetensors").open("r+b") as file:  # in place, as `cp` does
        file.write(b"the next model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == before


def test_weights_in_the_hub_s_cache_are_linked(tmp_path: Path) -> None:
    """Their names are hashes, so that nothing is ever written into them."""
    blobs, snapshot = (tmp_path / "models--mine--tiny" / name for name in ("blobs", "snapshots/0123"))
    tiny_model().save_pretrained(snapshot)
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "abcdef")
    (snapshot / "model.safetensors").symlink_to(blobs / "abcdef")
    adapt_model_folder(ModelConfig(path=str(snapshot)), tmp_path / "model")
    found = tmp_path / "model/model.safetensors"
    assert not found.is_symlink() and found.samefile(blobs / "abcdef")


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no config\.json"):
        adapt_model_folder(ModelConfig(path=str(tmp_path)), tmp_path / "model")
