"""vLLM before it is imported: what is refused, which engine a process keeps for its next stage (a record of what it is
told stands for it), and the fair lock between its steps and weight updates."""

import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused

from luffy.config.execution import VLLMConfig
from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, LostError, LuffyError
from luffy.rollout import kept_engine, vllm_engine, vllm_limits
from luffy.rollout.engine import RolloutRequest, SamplingParams, limit
from luffy.rollout.kept_engine import keep_engine, open_vllm
from luffy.rollout.vllm_engine import FairLock, VLLMEngine, _engine_arguments
from luffy.rollout.vllm_limits import check_adapters, cpu_cache_bytes, settled

SHAPE = {"num_attention_heads": 8, "hidden_size": 512, "max_position_embeddings": 1024}


def model(folder, tokenizer="{}", **shape):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | shape))
    (folder / "tokenizer.json").write_text(tokenizer)
    return folder


@pytest.fixture
def folder(tmp_path):
    return model(tmp_path / "one")


def test_a_request_s_own_limit_lowers_that_of_all():
    for own, expected in {None: 17, 5: 5, 40: 17}.items():
        request = RolloutRequest((1, 2), seed=0, prefix_ids=(3, 4, 5), max_new_tokens=own)
        assert limit(request, SamplingParams(1.0, 20, ())) == expected, own


@pytest.mark.parametrize(
    ("num_gpus", "longest", "config", "named"),
    [
        (0, None, {"tensor_parallel_size": 3}, ("tensor_parallel_size: 3", "8 attention heads")),
        (0, 1025, {}, ("1025", "1024")),
        (0, None, {"max_num_batched_tokens": 64}, ("64", "1024")),
        (0, None, {"tensor_parallel_size": 4}, ("4", "(0)", "use 1 at most")),
        (1, None, {"tensor_parallel_size": 4}, ("4", "(1)", "use 1 at most")),
        (2, None, {"tensor_parallel_size": 4}, ("4", "(2)", "use 2 at most")),
        (0, None, {"batch_invariant": True}, ("execution.vllm.batch_invariant", "8.0", "none", "false")),
        (2, None, {"batch_invariant": True}, ("execution.vllm.batch_invariant", "8.0", "older", "false")),
    ],
)
def test_what_model_and_machine_do_not_allow_is_refused(folder, monkeypatch, num_gpus, longest, config, named):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0) if number == 0 else (7, 5))
    with refused(*named, error=ConfigError):
        VLLMEngine.from_folder(folder, VLLMConfig(**config), "float32", max_model_len=longest)
    with refused(f"{folder}/none", "config.json", error=ConfigError):
        VLLMEngine.from_folder(folder / "none", VLLMConfig(), "float32")


def test_vllm_is_imported_with_the_variable_of_its_batch_invariant_kernels(folder, monkeypatch):
    def check(*_):  # right before the first import
        raise InterruptedError(os.environ["VLLM_BATCH_INVARIANT"])

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    for name in ("check_layout", "check_installed"):
        monkeypatch.setattr(vllm_engine, name, lambda *_: None)
    monkeypatch.setattr(vllm_engine, "_check_head_dim", check)
    with pytest.raises(InterruptedError, match="1"):
        VLLMEngine.from_folder(folder, VLLMConfig(batch_invariant=True), "float32")


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152, "max_position_embeddings": 8192,
}  # fmt: skip
TOKEN = 2 * 30 * 3 * 64 * 4
"""Bytes of a token in float32: a key and a value in each layer."""


def test_the_kv_cache_on_cpu_holds_the_sequences_of_the_experiment():
    for config, longest, positions, expected in (
        ({"cpu_kv_cache_gb": 0.5}, 256, 8192, 2**29),
        ({"max_num_seqs": 64}, 256, 8192, (64 * 256 + 128) * TOKEN),
        # Whole blocks, and 4 GiB at most, but always one sequence, of the model's context where it is not known.
        ({"max_num_seqs": 64}, 129, 8192, (64 * 256 + 128) * TOKEN),
        ({"max_num_seqs": 256}, 8192, 8192, 4 * 2**30 + 128 * TOKEN),
        ({"max_num_seqs": 1}, None, 8192, (8192 + 128) * TOKEN),
        ({}, None, 131072, (131072 + 128) * TOKEN),
    ):
        shape = SMOLLM2 | {"max_position_embeddings": positions}
        found = cpu_cache_bytes(VLLMConfig.model_validate(config), shape, "float32", longest)
        assert found == expected, (config, longest, positions)


def test_an_engine_is_compiled_on_a_gpu_unless_asked_otherwise_and_where_its_steps_pay_for_it(folder, monkeypatch):
    for on_gpu, asked, expected in ((True, False, False), (True, True, True), (False, False, True)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda on_gpu=on_gpu: on_gpu)
        found = _engine_arguments(folder, SMOLLM2, VLLMConfig(enforce_eager=asked), "float32", 256)
        assert found["enforce_eager"] is expected, (on_gpu, asked)
    for (responses, longest, asked), expected in {
        (256, 5999, None): True, (256, 6000, None): False, (257, 3000, None): False,
        (10**9, 6000, True): True, (1, 1, False): False,
    }.items():  # fmt: skip
        found = settled(VLLMConfig(enforce_eager=asked), responses, longest).enforce_eager
        assert found is expected, (responses, longest, asked)


@pytest.fixture
def told(monkeypatch):
    """What is done with engines, in a process that keeps them."""
    told = list[str]()

    def start(folder, config, dtype, *, max_model_len, sleep_mode, **options):
        told.append(f"start {folder.name} {max_model_len}{' to sleep' if sleep_mode else ''}")
        return SimpleNamespace(
            max_model_len=max_model_len,
            take_over=lambda folder: told.append(f"take over {folder.name}"),
            shut_down=lambda: told.append("shut down"),
        )

    monkeypatch.setattr(VLLMEngine, "from_folder", start)
    monkeypatch.setattr(kept_engine, "_keeps", False)
    monkeypatch.setattr(kept_engine, "_kept", None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    keep_engine()
    return told


def opened(folder, config=None, dtype="float32", longest=100, adapter=None):
    config = config or VLLMConfig(context_tokens=128)
    return open_vllm(folder, config, dtype, longest=longest, reads_text=False, adapter=adapter)


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
    caplog.set_level(logging.INFO)
    lengths = []
    for name, given in {"one": first, "two": second}.items():
        folder = model(tmp_path / name, given.get("tokenizer", "{}"), **given.get("shape", {}))
        config = VLLMConfig(context_tokens=128, **given.get("layout", {}))
        longest = given.get("longest", 100)
        opened(folder, config, given.get("dtype", "float32"), longest)
        lengths.append(f"{max(longest, 128)}{' to sleep' if on_gpu else ''}")
    again = ["take over two"] if is_kept else ["shut down", f"start two {lengths[1]}"]
    assert told == [f"start one {lengths[0]}", *again]
    assert caplog.messages[1].startswith("vLLM engine kept: weights of " if is_kept else "vLLM engine started in ")


def test_an_engine_with_an_adapter_replaces_the_kept_one_and_ends_with_its_stage(told, folder):
    for adapter in (None, LoRAConfig(rank=4, alpha=8.0), None):
        opened(folder, VLLMConfig(), adapter=adapter)
    assert told == ["start one 100", "shut down", "start one 100", "start one 100"]


def test_adapters_are_for_the_vllm_whose_layers_are_known_and_on_a_gpu_not_in_float32(monkeypatch):
    check_adapters("float32")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_adapters("bfloat16")
    with refused("execution.vllm.adapter: separate", "model.dtype: bfloat16", "merged", error=ConfigError):
        check_adapters("float32")
    monkeypatch.setattr(vllm_limits, "version", lambda package: "0.33.1")
    with refused("execution.vllm.adapter: separate", "0.33.1", "merged", "0.32.0", error=ConfigError):
        check_adapters("bfloat16")


def test_an_engine_has_no_more_room_than_the_model_has_positions(told, folder):
    config = VLLMConfig(context_tokens=1100)
    opened(folder, config)
    with refused("1024", error=ConfigError):
        opened(folder, config, longest=1025)
    assert told == ["start one 1024"]


def test_where_a_gpu_has_no_room_for_a_second_engine_another_process_tries(told, folder, monkeypatch):
    def refuse(*arguments, **options):
        raise ConfigError("no memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    opened(folder)
    monkeypatch.setattr(VLLMEngine, "from_folder", refuse)
    with pytest.raises(LostError, match="no memory"):
        opened(folder, longest=200)


def test_the_lock_goes_to_who_has_waited_longest_so_that_an_update_waits_for_one_step_of_each_thread():
    lock, had = FairLock(timeout_s=PATIENCE_S), []

    def take(name):
        with lock.held():
            had.append(name)

    with ThreadPoolExecutor(3) as threads, lock.held():
        for place, name in enumerate("abc", start=2):
            threads.submit(take, name)
            wait_until(lambda place=place: len(lock._queue) == place)
        assert had == []
    assert had == ["a", "b", "c"]


def test_a_wait_times_out_and_an_error_releases_the_lock():
    lock = FairLock(timeout_s=0.05)
    with lock.held(), pytest.raises(LuffyError, match=r"busy for 0\.05 s"), lock.held():
        raise AssertionError("nobody released the lock")
    with pytest.raises(KeyError), lock.held():
        raise KeyError
    with lock.held():
        pass
