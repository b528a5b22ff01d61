"""Which engine a process keeps for its next stage; vLLM is replaced by a record of what it is told."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from luffy.config.execution import VLLMConfig
from luffy.errors import ConfigError, LostError
from luffy.rollout import kept_engine
from luffy.rollout.kept_engine import keep_engine, open_vllm
from luffy.rollout.vllm_engine import VLLMEngine

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 256}
CONFIG = VLLMConfig(context_tokens=128)


def model(folder: Path, tokenizer: str = "{}", **shape: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """What is done with engines, in a process that keeps them."""
    told = list[str]()

    def start(folder: Path, config: VLLMConfig, dtype: str, *, max_model_len: int, sleep_mode: bool, **options: bool):
        told.append(f"start {folder.name} {max_model_len}{' to sleep' if sleep_mode else ''}")
        return SimpleNamespace(
            max_model_len=max_model_len,
            take_over=lambda folder: told.append(f"take over {folder.name}"),
            shut_down=lambda: told.append("shut down"),
        )

    monkeypatch.setattr(VLLMEngine, "from_folder", start)
    monkeypatch.setattr(kept_engine, "_keeps", False)
    monkeypatch.setattr(kept_engine, "_kept", None)
    keep_engine()
    return told


@pytest.mark.parametrize(
    ("on_gpu", "first", "second", "is_kept"),
    [
        (False, {}, {}, True),
        (False, {}, {"longest": 128}, True),
        (False, {}, {"longest": 129}, False),
        (False, {"longest": 200}, {"longest": 150}, True),
        (False, {}, {"dtype": "bfloat16"}, False),
        (False, {}, {"layout": {"max_num_seqs": 8}}, False),
        (False, {}, {"shape": {"hidden_size": 32}}, False),
        (False, {}, {"shape": {"use_cache": False}}, True),
        (False, {}, {"tokenizer": "{1: 2}"}, False),
        # A CPU never compiles.
        (False, {"layout": {"enforce_eager": True}}, {"layout": {"enforce_eager": False}}, True),
        (True, {"layout": {"enforce_eager": True}}, {"layout": {"enforce_eager": False}}, False),
        (True, {"layout": {"enforce_eager": False}}, {"layout": {"enforce_eager": True}}, True),
    ],
)
def test_an_engine_is_kept_for_weights_that_fit(told, tmp_path, monkeypatch, caplog, on_gpu, first, second, is_kept):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    caplog.set_level(logging.INFO)
    lengths = []
    for name, given in {"one": first, "two": second}.items():
        folder = model(tmp_path / name, given.get("tokenizer", "{}"), **given.get("shape", {}))
        config = CONFIG.model_copy(update=given.get("layout", {}))
        longest = given.get("longest", 100)
        open_vllm(folder, config, given.get("dtype", "float32"), longest=longest, reads_text=False)
        lengths.append(f"{max(longest, 128)}{' to sleep' if on_gpu else ''}")
    again = ["take over two"] if is_kept else ["shut down", f"start two {lengths[1]}"]
    assert told == [f"start one {lengths[0]}", *again]
    assert caplog.messages[1].startswith("vLLM engine kept: weights of " if is_kept else "vLLM engine started in ")


def test_an_engine_has_no_more_room_than_the_model_has_positions(told, tmp_path):
    config = VLLMConfig(context_tokens=300)
    open_vllm(model(tmp_path / "one"), config, "float32", longest=100, reads_text=False)
    with pytest.raises(ConfigError, match="longer than the model's context of 256"):
        open_vllm(tmp_path / "one", config, "float32", longest=257, reads_text=False)
    assert told == ["start one 256"]


def test_where_a_gpu_has_no_room_for_a_second_engine_another_process_tries(told, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    open_vllm(model(tmp_path / "one"), CONFIG, "float32", longest=100, reads_text=False)

    def refuse(*arguments: object, **options: object) -> None:
        raise ConfigError("no memory")

    monkeypatch.setattr(VLLMEngine, "from_folder", refuse)
    with pytest.raises(LostError, match="no memory"):
        open_vllm(tmp_path / "one", CONFIG, "float32", longest=200, reads_text=False)
