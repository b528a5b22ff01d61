"""The starting policy's folder: other people's weights are opened before they count, and it stays as it was given."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference.gradient_case import tiny_model
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from luffy.config.model import ModelConfig
from luffy.errors import DataError
from luffy.training.model_folder import adapt_model_folder, dequantise, load_causal_lm, model_folder

Damage = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model, whole."""
    tiny_model().save_pretrained(tmp_path / "given")
    return tmp_path / "given"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A small model in several files with an index."""
    tiny_model().save_pretrained(tmp_path / "given", max_shard_size="20KB")
    assert len(list((tmp_path / "given").glob("model-*.safetensors"))) > 1
    return tmp_path / "given"


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def config(**values: object) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def written(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')


BIASED = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (written("model.safetensors", b""), r"model.safetensors \(0 bytes\) is no whole safetensors file"),
        (written("model.safetensors", b"[" * 5000), "is no whole safetensors file"),
        (written("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}"), "is no whole safetensors file"),
        (cut, "is no whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights: neither model.safetensors nor"),
        (weights(lambda tensors: tensors.pop(BIASED)), f"1 of the weights .* are missing, the first is {BIASED}"),
        (weights(lambda tensors: tensors.pop("lm_head.weight")), "missing, the first is lm_head.weight"),
        (weights(lambda tensors: tensors.update({BIASED: torch.zeros(3)})), r"q_proj.bias has the shape \[3\], and"),
        (config(hidden_size=1 << 20), "has the shape .*, and config.json needs"),
        (config(num_hidden_layers=10**9), r"config.json has 1000000000 layers, and the weights are only \d+ tensors"),
        (config(num_attention_heads=0), "config.json describes no model that can be built"),
        (config(hidden_size="wide"), "config.json describes no model that can be built"),
        (
            written("config.json", b"[" * 100_000),
            "config.json is not JSON .*nested too deep: 100000 levels, at most 100",
        ),
        (written("config.json", b"[]"), "config.json has to be a JSON object, found list"),
        (adapter, r"holds an adapter \(adapter_config.json\), which would not be loaded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_folder_that_holds_no_whole_model_is_refused_in_one_line(folder: Path, damage: Damage, reason: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=reason) as caught:
        adapt_model_folder(ModelConfig(path=str(folder)), folder.parent / "out")
    assert str(caught.value).startswith(f"model.path: {folder}") and "\n" not in str(caught.value)
    if "config.json" not in reason:
        with pytest.raises(DataError, match=r"^rl\.teacher\.path: ") as caught:
            model_folder(str(folder), "rl.teacher.path")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ({"lm_head.weight": "model-9-of-9.safetensors"}, "names 'model-9-of-9.safetensors', which is no file"),
        ({"lm_head.weight": "../other.safetensors"}, "names '../other.safetensors', which is no file of the folder"),
        ({"lm_head.weight": 3}, "names '3', which is no file"),
        ([], "is no index of weights"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(sharded: Path, named: object, reason: str) -> None:
    save_file({}, sharded.parent / "other.safetensors")
    index = sharded / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"] = known["weight_map"] | named if isinstance(named, dict) else named
    index.write_text(json.dumps(known))
    with pytest.raises(DataError, match=reason):
        adapt_model_folder(ModelConfig(path=str(sharded)), sharded.parent / "out")


def test_a_shard_that_is_cut_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(DataError, match=f"{shard.name} .* is no whole safetensors file"):
        adapt_model_folder(ModelConfig(path=str(sharded)), sharded.parent / "out")


def test_only_the_weights_of_the_model_are_copied(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"the same again, by other names")
    adapt_model_folder(ModelConfig(path=str(sharded)), sharded.parent / "out")
    assert not (sharded.parent / "out/consolidated.safetensors").exists()
    assert torch.equal(
        load_causal_lm(sharded.parent / "out", "float32").lm_head.weight,
        load_causal_lm(sharded, "float32").lm_head.weight,
    )


@pytest.mark.parametrize(
    "model",
    [
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)),  # tied
        lambda: MixtralForCausalLM(  # stores experts one by one, which transformers fuses
            MixtralConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                num_local_experts=2,
            )
        ),
    ],
    ids=["tied", "experts"],
)
def test_weights_that_are_stored_in_another_way_than_loaded_are_whole(tmp_path: Path, model: Callable) -> None:
    model().save_pretrained(tmp_path / "given")
    adapt_model_folder(ModelConfig(path=str(tmp_path / "given")), tmp_path / "out")
    (tmp_path / "out/model.safetensors").unlink()
    tensors = load_file(tmp_path / "given/model.safetensors")
    tensors.pop(sorted(tensors)[-1])
    save_file(tensors, tmp_path / "given/model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="missing"):
        model_folder(str(tmp_path / "given"), "rl.teacher.path")


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(DataError, match=r"model\.path: .*model\.gguf is no whole \.gguf file") as caught:
        dequantise(tmp_path / "model.gguf", tmp_path / "out")
    assert "\n" not in str(caught.value)


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
