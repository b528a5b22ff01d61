"""vLLM really run on CPU with the LoRA adapter that a policy trains beside the weights of its folder."""

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from reference.lora_case import LAYERS, LORA, adapted_policy, factors
from support.installed import needs_no_gpu, needs_vllm
from support.patience import PATIENCE_S, wait_until
from support.refusals import refused
from torch import nn
from transformers import PreTrainedModel
from vllm_subjects import MAX_GAP, PARAMS, REQUESTS, gap, model_of, save, sleeping_as_on_a_gpu

from luffy.config.execution import VLLMConfig
from luffy.config.model import LoRAConfig
from luffy.errors import ConfigError, LostError
from luffy.rollout.engine import Completion, SamplingParams
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.training.policy import Policy
from luffy.training.ranks import init_process_group

pytestmark = [needs_vllm, needs_no_gpu, pytest.mark.slow]
CONFIG = VLLMConfig(cpu_kv_cache_gb=0.05, max_num_seqs=16)
CPU = torch.device("cpu")
NORM = "model.layers.1.input_layernorm.weight"


def scaled(by: float) -> LoRAConfig:
    return LORA.model_copy(update={"alpha": by * LORA.rank})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    init_process_group()
    return save(model_of(0), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[1.0, 2.0], ids=["alpha = rank", "alpha = 2 rank"])
def lora(request) -> LoRAConfig:
    return scaled(request.param)


@pytest.fixture(scope="module")
def engine(folder, lora) -> Iterator[VLLMEngine]:
    engine = VLLMEngine.from_folder(folder, CONFIG, "float32", adapter=lora)
    yield engine
    engine.close()


def trained(seed: int, lora: LoRAConfig) -> Policy:
    """A policy whose adapter is as after some training; seed 0: as before."""
    return adapted_policy(factors(seed, model_of(0)) if seed else None, lora=lora, model=model_of(0))


def merged(policy: Policy) -> PreTrainedModel:
    """The policy as a plain model, which generates with a cache."""
    model = model_of(0)
    model.load_state_dict(dict(policy.weights()), strict=False)
    return model


def test_each_update_replaces_the_adapter_and_samples_as_the_policy_that_is_trained(engine, lora):
    models: dict[int, PreTrainedModel] = {}
    assert engine.weight_version == -1
    for version in range(3):
        policy = trained(version, lora)
        sent = dict(policy.published(CPU))
        assert len(sent) == 3 * 7 * 2 and all(".lora_" in name for name in sent), "the factors alone"
        engine.load_weights(iter(sent.items()), version)
        models[version] = merged(policy)
        found = engine.generate(REQUESTS, PARAMS[1.0])
        assert gap(models, found) < MAX_GAP
        assert {sampled for each in found for sampled in each.weight_versions} == {version}
        assert all(gap({version: model}, found) > MAX_GAP for other, model in models.items() if other < version)


def test_rows_that_are_being_generated_go_on_with_the_next_adapter(engine, lora):
    policies, found = [trained(seed, lora) for seed in (0, 1, 2)], list[Completion]()
    engine.load_weights(policies[0].published(CPU), version=0)
    generating = threading.Thread(
        target=lambda: found.extend(engine.generate(REQUESTS, SamplingParams(1.0, 120, stop_token_ids=()))), daemon=True
    )
    generating.start()
    version = 0
    while generating.is_alive():
        wait_until(lambda: engine._running or not generating.is_alive(), "a row that is being generated")
        version += 1
        engine.load_weights(policies[version % 3].published(CPU), version)
    assert any(len(set(each.weight_versions)) > 1 for each in found)
    models = [merged(policy) for policy in policies]
    assert gap({number: models[number % 3] for number in range(version + 1)}, found) < MAX_GAP


@pytest.mark.parametrize("damage", ["lost weights", "lost adapter"])
def test_an_engine_that_wakes_damaged_is_refused(folder, monkeypatch, damage):
    """As on a GPU. An undamaged one goes on with weights and adapter, which level 1 keeps."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    turns = sleeping_as_on_a_gpu(monkeypatch)
    wake_up = CPUWorker.wake_up

    def wake_damaged(worker: CPUWorker, tags: list[str] | None) -> None:
        wake_up(worker, tags)
        if damage == "lost weights":
            dict(worker.get_model().named_parameters())[NORM].data.fill_(torch.nan)
        else:
            for module in worker.model_runner.lora_manager._adapter_manager.modules.values():
                module.reset_lora(0)

    engine = VLLMEngine.from_folder(folder, CONFIG, "float32", adapter=LORA, sleep_mode=True)
    engine.load_weights(trained(1, LORA).published(CPU), version=1)
    before = engine.generate(REQUESTS, PARAMS[1.0])
    engine.sleep()
    for part in ("weights", "kv_cache"):
        engine.wake_up(part)
    assert engine.generate(REQUESTS, PARAMS[1.0]) == before
    assert turns == ["sleep 1", "all"]
    engine.sleep()
    monkeypatch.setattr(CPUWorker, "wake_up", wake_damaged)
    with pytest.raises(LostError, match=r"nats from those before it slept: .* execution.vllm.adapter=merged"):
        engine.wake_up("weights")
    engine.close()


def test_an_update_that_a_merged_weight_would_round_away_moves_the_engine_in_bfloat16(tmp_path):
    init_process_group()
    base = model_of(0)
    for name, module in base.named_modules():
        if name in LAYERS:
            assert isinstance(module, nn.Linear)
            module.weight.data.sign_().mul_(0.125)  # of one size, whose last bit is 2^-11
    folder = save(copy.deepcopy(base).to(torch.bfloat16), tmp_path)
    small = {name: 0.0004 * factor if name.endswith("B") else factor for name, factor in factors(1, base).items()}
    policy = adapted_policy(small, "bfloat16", lora=LORA, model=base, zero_stage=1)
    stored = dict(base.to(torch.bfloat16).named_parameters())
    assert all(weight.equal(stored[name]) for name, weight in policy.weights()), "merged, nothing has changed"

    engine = VLLMEngine.from_folder(folder, CONFIG, "bfloat16", adapter=LORA)
    params = SamplingParams(0.0, 1, stop_token_ids=())
    engine.load_weights(adapted_policy(None, "bfloat16", lora=LORA, model=base, zero_stage=1).published(CPU), version=0)
    before = engine.generate(REQUESTS, params)
    engine.load_weights(policy.published(CPU), version=1)
    after = engine.generate(REQUESTS, params)
    assert any(one.logprobs != other.logprobs for one, other in zip(before, after, strict=True))
    engine.close()


WITH_KERNELS = """
from pathlib import Path
from luffy.config.execution import VLLMConfig
from luffy.rollout import vllm_engine
vllm_engine.check_layout = lambda *_: None
plain = VLLMConfig.model_validate_json({config!r})
vllm_engine.VLLMEngine.from_folder(Path({folder!r}), plain, "float32").close()
config = plain.model_copy(update={{"batch_invariant": True}})
vllm_engine.VLLMEngine.from_folder(Path({folder!r}), config, "float32")
"""


def test_workers_without_batch_invariant_kernels_are_refused(folder):
    """vLLM was imported before the setting, and says nothing. A process of its own, since torch's operators change."""
    script = WITH_KERNELS.format(config=CONFIG.model_dump_json(), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert "execution.vllm.batch_invariant: vLLM does not have these kernels" in done.stderr, done.stderr


def test_a_factor_that_the_model_has_no_layer_for_is_refused(engine, lora):
    """The last test of an engine: it cannot be used afterwards."""
    sent = {name.replace("layers.2.", "layers.7."): factor for name, factor in trained(1, lora).published(CPU)}
    with refused("model.lora", "model.layers.7.mlp.down_proj", "execution.vllm.adapter: merged", error=ConfigError):
        engine.load_weights(iter(sent.items()), version=3)
