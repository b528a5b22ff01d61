"""What is refused before vLLM is even imported, and the fair lock between its steps and weight updates."""

import json
import statistics
import threading
import time
from pathlib import Path

import pytest
import torch
from support.patience import PATIENCE_S
from support.refusals import refused

from luffy.config.execution import VLLMConfig
from luffy.errors import ConfigError, LuffyError
from luffy.rollout.engine import RolloutRequest, SamplingParams, limit
from luffy.rollout.vllm_engine import FairLock, VLLMEngine, _engine_arguments
from luffy.rollout.vllm_limits import cpu_cache_bytes, settled

SHAPE = {"num_attention_heads": 8, "hidden_size": 512, "max_position_embeddings": 1024}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


@pytest.mark.parametrize(("own", "expected"), [(None, 17), (5, 5), (40, 17)])
def test_a_request_s_own_limit_lowers_that_of_all(own: int | None, expected: int) -> None:
    request = RolloutRequest((1, 2), seed=0, prefix_ids=(3, 4, 5), max_new_tokens=own)
    assert limit(request, SamplingParams(1.0, 20, ())) == expected


@pytest.mark.parametrize(
    ("num_gpus", "longest", "config", "named"),
    [
        (0, None, {"tensor_parallel_size": 3}, ("tensor_parallel_size: 3", "8 attention heads")),
        (0, 1025, {}, ("1025", "1024")),
        (0, None, {"max_num_batched_tokens": 64}, ("64", "1024")),
        (0, None, {"tensor_parallel_size": 4}, ("4", "(0)", "use 1 at most")),
        (1, None, {"tensor_parallel_size": 4}, ("4", "(1)", "use 1 at most")),
        (2, None, {"tensor_parallel_size": 4}, ("4", "(2)", "use 2 at most")),
    ],
)
def test_what_model_and_machine_do_not_allow_is_refused(folder, monkeypatch, num_gpus, longest, config, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with refused(*named, error=ConfigError):
        VLLMEngine.from_folder(folder, VLLMConfig(**config), "float32", max_model_len=longest)
    with refused(f"{folder}/none", "config.json", error=ConfigError):
        VLLMEngine.from_folder(folder / "none", VLLMConfig(), "float32")


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
}  # fmt: skip
TOKEN = 2 * 30 * 3 * 64 * 4
"""Bytes of a token in float32: a key and a value in each layer."""


@pytest.mark.parametrize(
    ("config", "longest", "expected"),
    [
        ({"cpu_kv_cache_gb": 0.5}, 256, 2**29),
        ({"max_num_seqs": 64}, 256, (64 * 256 + 128) * TOKEN),
        ({"max_num_seqs": 64}, 129, (64 * 256 + 128) * TOKEN),
        ({"max_num_seqs": 256}, 8192, 4 * 2**30 + 128 * TOKEN),
        ({"max_num_seqs": 1}, None, (8192 + 128) * TOKEN),
    ],
    ids=["as configured", "by its sequences", "whole blocks", "4 GiB at most", "the context of the model"],
)
def test_the_kv_cache_on_cpu_holds_the_sequences_of_the_experiment(config, longest, expected):
    assert cpu_cache_bytes(VLLMConfig.model_validate(config), SMOLLM2, "float32", longest) == expected


def test_the_kv_cache_on_cpu_always_holds_one_sequence() -> None:
    long = SMOLLM2 | {"max_position_embeddings": 131072}
    assert cpu_cache_bytes(VLLMConfig(), long, "float32", None) == (131072 + 128) * TOKEN


@pytest.mark.parametrize(
    ("on_gpu", "asked", "expected"), [(True, False, False), (True, True, True), (False, False, True)]
)
def test_a_start_without_compilation(on_gpu, asked, expected, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    found = _engine_arguments(folder, SMOLLM2, VLLMConfig(enforce_eager=asked), "float32", 256)
    assert found["enforce_eager"] is expected


@pytest.mark.parametrize(
    ("responses", "longest", "asked", "expected"),
    [
        (256, 5999, None, True),
        (256, 6000, None, False),
        (257, 3000, None, False),
        (10**9, 6000, True, True),
        (1, 1, False, False),
    ],
)
def test_an_engine_is_compiled_where_its_steps_pay_for_it(responses, longest, asked, expected):
    assert settled(VLLMConfig(enforce_eager=asked), responses, longest).enforce_eager is expected


def started(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_thread_waits_for_about_one_turn_of_each_other_thread() -> None:
    lock, stop, had = FairLock(timeout_s=PATIENCE_S), threading.Event(), []

    def step() -> None:
        while not stop.is_set():
            with lock.held():
                had.append(None)
                time.sleep(0.002)

    threads = [started(step) for _ in range(2)]
    waits = []
    for _ in range(40):
        before = len(had)
        with lock.held():
            waits.append(len(had) - before)
    stop.set()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    # The median: the scheduler may suspend this thread between counting and asking for the lock.
    assert 1 <= statistics.median(waits) <= 3


def test_a_wait_times_out_and_an_error_releases_the_lock() -> None:
    lock = FairLock(timeout_s=0.05)
    with lock.held(), pytest.raises(LuffyError, match=r"busy for 0\.05 s"), lock.held():
        raise AssertionError("nobody released the lock")
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    with lock.held():
        pass
