"""Model folders made by strangers: no code of theirs runs, and no pickle is opened."""

import ast
import json
import pickle
import sys
from pathlib import Path

import pytest
from reference.gradient_case import tiny_model

import luffy
from luffy.config.model import ModelConfig
from luffy.data.tokenizer import adapt_tokenizer
from luffy.errors import DataError
from luffy.model_shape import architecture_of
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.model_folder import adapt_model_folder, copy_tokenizer, load_causal_lm, model_folder

LOADERS = {"from_pretrained", "from_config"}


class Owned:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple:
        return Path.touch, (self.file,)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model, as somebody has made it."""
    tiny_model().save_pretrained(tmp_path / "given")
    return tmp_path / "given"


def name_code(folder: Path, **values: object) -> Path:
    """Let the configuration name a module of the folder, which leaves a file when it is imported; returns that file."""
    owned = folder.parent / "owned"
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": code, **values}))
    (folder / "own.py").write_text(f"open({str(owned)!r}, 'w')\n")
    return owned


def test_a_folder_that_exists_only_as_code_is_refused_before_anything_starts(folder: Path) -> None:
    owned = name_code(folder, model_type="own")
    model = ModelConfig(path=str(folder))
    for refusing in (
        lambda: architecture_of(model),
        lambda: adapt_model_folder(model, folder.parent / "out"),
        lambda: model_folder(str(folder), "rl.teacher.path"),
    ):
        with pytest.raises(DataError, match=r"model_type 'own' is defined by Python code .* never run") as caught:
            refusing()
        assert "\n" not in str(caught.value)
    assert not owned.exists()


def test_code_beside_a_known_kind_of_model_is_neither_run_nor_copied(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # nobody is asked
    owned = name_code(folder)
    (folder / "training_args.bin").write_bytes(pickle.dumps(Owned(owned)))
    adapt_model_folder(ModelConfig(path=str(folder)), folder.parent / "model")
    assert type(load_causal_lm(folder, "float32")).__name__ == "Qwen2ForCausalLM"
    TransformersEngine.from_folder(folder, "float32", 1)
    assert not owned.exists()
    assert sorted(path.suffix for path in (folder.parent / "model").iterdir()) == [".json", ".safetensors"]
    assert "auto_map" not in json.loads((folder.parent / "model" / "config.json").read_text())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_never_opened(folder: Path, name: str) -> None:
    owned = folder.parent / "owned"
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Owned(owned)))
    with pytest.raises(DataError, match=f"its weights are pickled \\({name}\\), and opening a pickle can run code"):
        architecture_of(ModelConfig(path=str(folder)))
    with pytest.raises(DataError, match="weights are pickled"):
        adapt_model_folder(ModelConfig(path=str(folder)), folder.parent / "out")
    with pytest.raises(OSError, match="safetensors"):
        load_causal_lm(folder, "float32")
    assert not owned.exists()


@pytest.mark.parametrize("name", ["notes.json", "model-00002.safetensors", "tokenizer_config.json", "LICENSE"])
def test_what_a_link_leads_to_is_not_copied_into_the_workspace(folder: Path, name: str) -> None:
    secret = folder.parent / "secret"
    secret.write_text('{"key": "canary"}')
    (folder / name).symlink_to(secret)
    model = ModelConfig(path=str(folder))
    for adopting in (
        lambda: adapt_model_folder(model, folder.parent / "out"),
        lambda: model_folder(str(folder), "rl.teacher.path"),
        lambda: adapt_tokenizer(str(folder), None),
        lambda: copy_tokenizer(folder, folder.parent / "out"),
    ):
        with pytest.raises(DataError, match=rf"{name} is a link out of the folder, to {secret}") as caught:
            adopting()
        assert "\n" not in str(caught.value)
    assert not (folder.parent / "out").exists()


def test_a_tokenizer_that_is_code_is_refused(tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    code = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": code}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}))
    (tmp_path / "own.py").write_text(f"open({str(owned)!r}, 'w')\n")
    with pytest.raises(DataError, match="no tokenizer at"):
        adapt_tokenizer(str(tmp_path), None)
    assert not owned.exists()


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b'{"model": {"type": "BPE", "vocab": 3}}', b"\xff\xfe"])
def test_a_tokenizer_file_that_is_none_is_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(DataError, match="no tokenizer at") as caught:
        adapt_tokenizer(str(tmp_path), "none")
    assert "\n" not in str(caught.value)


def test_nothing_in_luffy_loads_a_model_with_code_or_unpickles_a_file() -> None:
    calls = [
        (path.name, node)
        for path in sorted(Path(luffy.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    of_models = [(name, call) for name, call in calls if call.func.attr in LOADERS and "Auto" in ast.unparse(call.func)]
    assert len(of_models) >= 8
    for name, call in of_models:
        assert "trust_remote_code=False" in ast.unparse(call), f"{name}: {ast.unparse(call)}"
    unpickling = {
        name for name, call in calls if ast.unparse(call.func) in ("torch.load", "pickle.load", "pickle.loads")
    }
    # Bytes from its own parent; from a process of the same stage, through Ray, which pickles all that it carries.
    assert unpickling == {"shards.py", "tensor_sharing.py"}
