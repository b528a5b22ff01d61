"""Model folders made by other people: opened before they count, and no code of theirs runs; loading them in shares."""

import ast
import json
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch
from reference.attention_case import model_of
from reference.gradient_case import OPTIMIZER, execution, make_batch, tiny_model
from safetensors.torch import load_file, save_file
from support.refusals import refused
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import luffy
from luffy.config.model import DType, ModelConfig
from luffy.data.tokenizer import adapt_tokenizer
from luffy.errors import DataError
from luffy.model_shape import architecture_of
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.deepspeed_engine import is_sharded, load_to_train
from luffy.training.model_folder import adapt_model_folder, copy_tokenizer, dequantise, load_causal_lm, model_folder
from luffy.training.policy import FrozenPolicy, Policy
from luffy.training.policy_model import refuse_processed_logits

Damage = Callable[[Path], object]
BIASED = "model.layers.0.self_attn.q_proj.bias"
SHARDED = execution(zero_stage=3)
SIZES = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model, whole."""
    tiny_model().save_pretrained(tmp_path / "given")
    return tmp_path / "given"


def adopt(folder: Path, **settings: object) -> Path:
    adapt_model_folder(ModelConfig(path=str(folder), **settings), folder.parent / "out")
    return folder.parent / "out"


def in_shards(folder: Path) -> dict[str, object]:
    """The same model in several files; returns its index."""
    (folder / "model.safetensors").unlink()
    tiny_model().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return json.loads((folder / "model.safetensors.index.json").read_text())


def weights(change: Callable[[dict[str, Tensor]], object]) -> Damage:
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
    return lambda folder: (folder / name).write_bytes(content)


def index(named: object) -> Damage:
    """An index of which some weights lie elsewhere."""

    def damage(folder: Path) -> None:
        known = in_shards(folder)
        save_file({}, folder.parent / "other.safetensors")
        known["weight_map"] = known["weight_map"] | named if isinstance(named, dict) else named
        (folder / "model.safetensors.index.json").write_text(json.dumps(known))

    return damage


def cut(name: str) -> Damage:
    def damage(folder: Path) -> None:
        if name != "model.safetensors":
            in_shards(folder)
        file = sorted(folder.glob(name))[-1]
        file.write_bytes(file.read_bytes()[:-8])

    return damage


REFUSED = [  # the damage, and what the line names
    (written("model.safetensors", b""), ["model.safetensors (0 bytes)"]),
    (written("model.safetensors", b"[" * 5000), ["model.safetensors (5000 bytes)"]),
    (written("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}"), ["model.safetensors (10 bytes)"]),
    (cut("model.safetensors"), ["no whole safetensors file"]),
    (cut("model-*.safetensors"), ["model-0000", "no whole safetensors file"]),
    (lambda folder: (folder / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
    (weights(lambda tensors: tensors.pop(BIASED)), ["1 of the weights", f"the first is {BIASED}"]),
    (weights(lambda tensors: tensors.pop("lm_head.weight")), ["the first is lm_head.weight"]),
    (weights(lambda tensors: tensors.update({BIASED: torch.zeros(3)})), ["q_proj.bias has the shape [3]"]),
    (config(tie_word_embeddings=True), ["config.json ties lm_head.weight", "tie_word_embeddings"]),
    (config(hidden_size=1 << 20), ["has the shape", "config.json"]),
    (config(num_hidden_layers=10**9), ["config.json has 1000000000 layers"]),
    (config(num_attention_heads=0), ["config.json", "no model that can be built"]),
    (config(hidden_size="wide"), ["config.json", "no model that can be built"]),
    (written("config.json", b"[" * 100_000), ["config.json", "100000 levels, at most 100"]),
    (written("config.json", b"[]"), ["config.json", "found list"]),
    (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    (written("adapter_config.json", b'{"base_model_name_or_path": "somebody/else"}'), ["adapter_config.json"]),
    (index({"lm_head.weight": "model-9-of-9.safetensors"}), ["'model-9-of-9.safetensors'"]),
    (index({"lm_head.weight": "../other.safetensors"}), ["'../other.safetensors'", "no file of the folder"]),
    (index({"lm_head.weight": 3}), ["'3'"]),
    (index([]), ["no index of weights"]),
]


@pytest.mark.parametrize(("damage", "named"), REFUSED, ids=lambda value: value[0] if isinstance(value, list) else "")
def test_a_folder_that_holds_no_whole_model_is_refused_in_one_line(folder: Path, damage: Damage, named: list[str]):
    damage(folder)
    with refused(f"model.path: {folder}", *named, error=DataError):
        adopt(folder)
    if not any("config.json" in name for name in named):
        with refused("rl.teachers.teacher.path: ", error=DataError):
            model_folder(str(folder), "rl.teachers.teacher.path")


def test_only_the_weights_of_the_model_are_copied_and_stay_when_the_given_ones_are_written_again(folder: Path) -> None:
    in_shards(folder)
    (folder / "consolidated.safetensors").write_bytes(b"the same again, by other names")
    head = load_causal_lm(folder, "float32").lm_head.weight.clone()
    out = adopt(folder)
    assert not (out / "consolidated.safetensors").exists()
    for file in folder.glob("model-*.safetensors"):
        with file.open("r+b") as opened:  # in place, as `cp` does
            opened.write(b"the next model")
    assert torch.equal(load_causal_lm(out, "float32").lm_head.weight, head)


def test_weights_in_the_hub_s_cache_are_linked(tmp_path: Path) -> None:
    """Their names are hashes, so that nothing is ever written into them."""
    blobs, snapshot = (tmp_path / "models--mine--tiny" / name for name in ("blobs", "snapshots/0123"))
    tiny_model().save_pretrained(snapshot)
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "abcdef")
    (snapshot / "model.safetensors").symlink_to(blobs / "abcdef")
    found = adopt(snapshot) / "model.safetensors"
    assert not found.is_symlink() and found.samefile(blobs / "abcdef")


def gpt2() -> PreTrainedModel:
    """Its head is tied to its embeddings, and its weights are stored transposed."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=32, n_embd=16, n_layer=1, n_head=2))


def mixtral() -> PreTrainedModel:
    """Its experts are stored one by one, and transformers fuses them."""
    return MixtralForCausalLM(MixtralConfig(num_local_experts=2, **SIZES))


@pytest.mark.parametrize("model", [gpt2, mixtral])
def test_weights_that_are_stored_in_another_way_than_loaded_are_whole(tmp_path: Path, model: Callable) -> None:
    model().save_pretrained(tmp_path / "given")
    (adopt(tmp_path / "given") / "model.safetensors").unlink()
    weights(lambda tensors: tensors.pop(max(tensors)))(tmp_path / "given")
    with refused("missing", error=DataError):
        model_folder(str(tmp_path / "given"), "rl.teachers.teacher.path")


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs the package gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with refused("model.path", "model.gguf", error=DataError):
        dequantise(tmp_path / "model.gguf", tmp_path / "out")


def test_adapting_a_folder_changes_its_configuration_and_keeps_its_weights(tmp_path: Path) -> None:
    model, given = tiny_model(), tmp_path / "given"
    model.generation_config.temperature = 0.3
    model.generation_config.do_sample = True
    model.save_pretrained(given)
    before = {file.name: file.read_bytes() for file in given.iterdir()}
    for _ in range(2):  # again after a kill
        out = adopt(given, rope_theta=40000.0, max_position_embeddings=256)
    adapted = load_causal_lm(out, "float32")
    assert adapted.config.max_position_embeddings == 256
    assert adapted.config.rope_parameters["rope_theta"] == 40000.0
    assert torch.equal(adapted.lm_head.weight, model.lm_head.weight)
    assert not (out / "generation_config.json").exists()
    assert {file.name: file.read_bytes() for file in given.iterdir()} == before


@pytest.mark.parametrize("values", [{"rope_theta": 10000.0}, {"rope_parameters": None}], ids=["before 5", "none"])
def test_the_base_of_the_rotations_may_be_written_as_before_transformers_5_or_missing(folder: Path, values) -> None:
    file = folder / "config.json"
    known = json.loads(file.read_text())
    del known["rope_parameters"]
    file.write_text(json.dumps(known | values))
    assert load_causal_lm(adopt(folder, rope_theta=4e4), "float32").config.rope_parameters["rope_theta"] == 4e4


def test_the_base_of_the_rotations_may_be_one_for_each_kind_of_layer(tmp_path: Path) -> None:
    gemma = Gemma3TextConfig(**SIZES | {"num_hidden_layers": 2}, head_dim=8, layer_types=None)
    Gemma3ForCausalLM(gemma).save_pretrained(tmp_path / "given")
    rope = json.loads((adopt(tmp_path / "given", rope_theta=4e4) / "config.json").read_text())["rope_parameters"]
    bases = {kind: each["rope_theta"] for kind, each in rope.items()}
    assert bases == {"full_attention": 4e4, "sliding_attention": 4e4}


class Owned:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


def name_code(folder: Path, **values: object) -> Path:
    """Let the configuration name a module of the folder, which leaves a file when it is imported; returns that file."""
    owned = folder.parent / "owned"
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel", "AutoTokenizer": [None, "own.T"]}
    config(auto_map=code, **values)(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T", "auto_map": code}))
    (folder / "own.py").write_text(f"open({str(owned)!r}, 'w')\n")
    return owned


def test_a_folder_that_exists_only_as_code_is_refused_before_anything_starts(folder: Path) -> None:
    owned = name_code(folder, model_type="own")
    for refusing in (
        lambda: architecture_of(ModelConfig(path=str(folder))),
        lambda: adopt(folder),
        lambda: model_folder(str(folder), "rl.teachers.teacher.path"),
    ):
        with refused("model_type 'own' is defined by Python code", "never run", error=DataError):
            refusing()
    with refused("no tokenizer at", error=DataError):
        adapt_tokenizer(str(folder), None)
    assert not owned.exists()


def test_code_beside_a_known_kind_of_model_is_neither_run_nor_copied(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked
    owned = name_code(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "training_args.bin").write_bytes(pickle.dumps(Owned(owned)))
    out = adopt(folder)
    assert type(load_causal_lm(folder, "float32")).__name__ == "Qwen2ForCausalLM"
    TransformersEngine.from_folder(folder, "float32", 1)
    assert not owned.exists()
    assert sorted(path.suffix for path in out.iterdir()) == [".json", ".safetensors"]
    assert "auto_map" not in json.loads((out / "config.json").read_text())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(folder: Path, name: str) -> None:
    owned = folder.parent / "owned"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Owned(owned)))
    with refused(f"weights are pickled ({name})", error=DataError):
        architecture_of(ModelConfig(path=str(folder)))
    with refused("weights are pickled", error=DataError):
        adopt(folder)
    with pytest.raises(OSError, match="safetensors"):
        load_causal_lm(folder, "float32")
    assert not owned.exists()


@pytest.mark.parametrize("name", ["notes.json", "model-00002.safetensors", "tokenizer_config.json", "LICENSE"])
def test_what_a_link_leads_to_is_not_copied_into_the_workspace(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.write_text('{"key": "canary"}')
    (folder / name).symlink_to(secret)
    for adopting in (
        lambda: adopt(folder),
        lambda: model_folder(str(folder), "rl.teachers.teacher.path"),
        lambda: adapt_tokenizer(str(folder), None),
        lambda: copy_tokenizer(folder, folder.parent / "out"),
    ):
        with refused(f"{name} is a link out of the folder, to {secret}", error=DataError):
            adopting()
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"model": {"type": "BPE", "vocab": 3}}', b"\xff\xfe"])
def test_a_tokenizer_file_that_is_none_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with refused("no tokenizer at", error=DataError):
        adapt_tokenizer(str(tmp_path), "none")


def test_nothing_in_luffy_loads_a_model_with_code_or_unpickles_a_file() -> None:
    calls = [
        (path.name, node)
        for path in sorted(Path(luffy.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    loaders = {"from_pretrained", "from_config"}
    of_models = [(name, call) for name, call in calls if call.func.attr in loaders and "Auto" in ast.unparse(call.func)]
    assert len(of_models) >= 8
    for name, call in of_models:
        assert "trust_remote_code=False" in ast.unparse(call), f"{name}: {ast.unparse(call)}"
    unpickling = {
        name for name, call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")
    }
    # Bytes from its own parent; from a process of the same stage, through Ray, which pickles all that it carries.
    assert unpickling == {"rank_processes.py", "shards.py", "tensor_sharing.py"}


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers, whole."""
    named = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3", "float32"), ("llama", "bfloat16"), ("gpt2", "float32")])
def test_weights_and_buffers_loaded_in_shares_are_those_of_an_ordinary_load(kind: str, dtype: DType, tmp_path: Path):
    saved = gpt2() if kind == "gpt2" else model_of(kind)
    saved.generation_config.max_new_tokens = 7
    saved.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, whole = load_to_train(tmp_path, dtype, SHARDED), load_causal_lm(tmp_path, dtype)
    assert is_sharded(model) and not any(parameter.numel() for parameter in model.parameters())
    found, expected = tensors(model), tensors(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    assert model.config.to_dict() == whole.config.to_dict()
    assert model.generation_config.to_dict() == whole.generation_config.to_dict()


def test_weights_that_are_stored_in_another_form_are_loaded_whole(tmp_path, caplog):
    experts = {"moe_intermediate_size": 8, "num_experts": 2, "shared_expert_intermediate_size": 8}
    mixture = Qwen2MoeForCausalLM(Qwen2MoeConfig(num_experts_per_tok=1, **experts, **SIZES))
    mixture.save_pretrained(tmp_path)
    found = load_to_train(tmp_path, "float32", SHARDED)
    assert "is loaded whole on every rank" in caplog.text and not is_sharded(found)
    assert all(torch.equal(tensor, tensors(mixture)[name]) for name, tensor in tensors(found).items())


@pytest.mark.parametrize("packing", [True, False])
def test_a_frozen_policy_in_shares_scores_as_a_whole_one(packing: bool, tmp_path: Path) -> None:
    model = tiny_model(tie=True)
    model.save_pretrained(tmp_path)
    where = execution(zero_stage=3, micro_batch_tokens=50, packing=packing)
    batch = make_batch("luffy", model)
    sharded = FrozenPolicy(load_to_train(tmp_path, "float32", where), where, 1.3)
    whole = FrozenPolicy(model, where, 1.3)
    assert is_sharded(sharded.causal_lm)
    for _ in range(2):  # from the second pass on DeepSpeed gathers ahead
        assert torch.equal(sharded.logprobs(batch), whole.logprobs(batch))


def test_an_architecture_that_caps_its_logits_is_refused_whole_and_in_shares(tmp_path: Path) -> None:
    model = Gemma2ForCausalLM(Gemma2Config(head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5, **SIZES))
    model.save_pretrained(tmp_path)
    with refused("Gemma2ForCausalLM", error=DataError):
        refuse_processed_logits(load_to_train(tmp_path, "float32", SHARDED))
    with refused("Gemma2ForCausalLM", error=DataError):
        Policy(model, OPTIMIZER, execution(), "float32")
