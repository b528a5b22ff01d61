"""The memory estimate, by hand and against what transformers, torch and DeepSpeed really keep."""

import gc
import json

import pytest
import torch
import transformers
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from safetensors.torch import load_file
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.reward_models import reward_folder
from torch.distributed._tools.mem_tracker import MemTracker

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig
from luffy.config.model import LoRAConfig, ModelConfig
from luffy.config.training import OptimizerConfig
from luffy.data.tokenizer import MAX_VOCABULARY
from luffy.model_shape import (
    TINY_VOCABULARY,
    adapter_activation_bytes,
    adapter_parameters,
    architecture_of,
    from_model_config,
    linear_layers,
)
from luffy.pipeline import memory
from luffy.pipeline.gpus import gpus_of_stage
from luffy.pipeline.memory import estimate_memory, generation_memory
from luffy.rollout import transformers_engine
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.training import deepspeed_engine
from luffy.training.attention import attention_inputs, set_attention
from luffy.training.policy_model import Adapter, PolicyModel

SEVEN_B = CONFIGS / "luffy_qwen2.5_math_7b.yaml"
GIB = 2**30
SHAPE = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
UNTIED, BIASED = "qwen2 untied", "llama, all biases"
KINDS = {
    UNTIED: (transformers.Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2 tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 32}),
    "llama": (transformers.LlamaConfig, {}),
    BIASED: (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
}
PASSED = (UNTIED, "qwen3", BIASED)
"""Kinds whose layers differ in what a pass keeps."""
DTYPES = {torch.float32: 4, torch.bfloat16: 2}
LAYOUTS = {"padded": ExecutionConfig(), "packed": ExecutionConfig(packing=True)}
ALL, SOME, DROPPED = (
    LoRAConfig(rank=8, alpha=16.0, **more) for more in ({}, {"targets": ("q_proj", "down_proj")}, {"dropout": 0.1})
)


@pytest.fixture(autouse=True)
def plain_linear(monkeypatch) -> None:
    """DeepSpeed's ZeRO 3 replaces the function for the rest of the process, with one that saves more."""
    own = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", torch.nn.functional.linear)
    monkeypatch.setattr(torch.nn.functional, "linear", own)


def config_of(kind=UNTIED, **changes):
    make, own = KINDS[kind]
    return make(**{**SHAPE, **own, **changes})


def architecture(config):
    return from_model_config(json.loads(config.to_json_string(use_diff=False)))


def loaded(config, dtype):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def model_of(config, dtype=torch.float32, layout="padded", lora=None):
    model = loaded(config, dtype)
    if model.device.type != "meta":
        set_attention(model, LAYOUTS[layout])
    if lora is not None:
        Adapter(model, lora, seed=0)
    return model.train()


# ---- shapes ----


@pytest.mark.parametrize("kind", KINDS)
def test_the_parameters_of_models_and_adapters_are_counted(kind):
    config = config_of(kind)
    with torch.device("meta"):
        assert architecture(config).num_parameters == model_of(config).num_parameters()
    linear = {name for name, module in model_of(config).named_modules() if type(module) is torch.nn.Linear}
    assert set(linear_layers(architecture(config))) == linear - {"lm_head"}
    for lora in (ALL, SOME):
        parameters = model_of(config, lora=lora).parameters()
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        assert adapter_parameters(architecture(config), lora) == trained


PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304, "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512, "Qwen/Qwen2.5-14B": 14_770_033_664, "Qwen/Qwen2.5-32B": 32_763_876_352,
    "meta-llama/Llama-3.1-8B": 8_030_261_248, "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
}  # fmt: skip


NO_HEADS = json.dumps({"model_type": "qwen2", **SHAPE, "num_attention_heads": 0})


def test_shapes_are_read_from_model_folders_or_known_and_not_guessed(tmp_path):
    known = {path: architecture_of(ModelConfig(path=path)).num_parameters for path in PUBLISHED}
    assert known == PUBLISHED
    folder, file = ModelConfig(path=str(tmp_path)), tmp_path / "config.json"
    with refused(str(tmp_path), "has no config.json; give a Hugging Face model folder"):
        architecture_of(folder)
    for content, message in (
        ("{", ""),
        ("[]", ""),
        ('{"model_type": "qwen2"}', " ('hidden_size')"),
        (NO_HEADS, " (0 is no size)"),
    ):
        file.write_text(content)
        with refused(str(tmp_path), f"is no model's configuration{message}"):
            architecture_of(folder)
    config_of("qwen2 tied").save_pretrained(tmp_path)
    assert architecture_of(folder) == architecture(config_of("qwen2 tied"))
    file.write_text('{"model_type": "gpt2"}')
    assert architecture_of(folder) is architecture_of(ModelConfig(path="nobody/has-this-model")) is None
    tiny = architecture_of(load_experiment("smoke").model)
    assert tiny.vocabulary_size == TINY_VOCABULARY == MAX_VOCABULARY


# ---- measured: what layers and passes keep ----


def inputs(rows, width, layout="padded"):
    """Ids, positions, what is a response, and the bounds of the sequences."""
    ids_BT = torch.randint(0, SHAPE["vocab_size"], (rows, width))
    position_BT = torch.arange(width).repeat(rows, 1)
    response_BT = position_BT > 0
    if layout == "packed":
        ids_BT, position_BT, response_BT = (part.view(1, -1) for part in (ids_BT, position_BT, response_BT))
    else:
        response_BT[0, width // 2 :] = False
    return ids_BT, position_BT, response_BT, attention_inputs(position_BT, LAYOUTS[layout])


def storages(tensors):
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def kept_bytes(model, layout):
    """Bytes of each token that a forward pass keeps for the backward pass, weights aside."""
    rows, width = 2, 48
    ids_BT, position_BT, _, bounds = inputs(rows, width, layout)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        model.get_decoder()(input_ids=ids_BT, position_ids=position_BT, use_cache=False, **bounds)
    weights = storages(model.parameters())
    return sum(size for place, size in storages(kept).items() if place not in weights) / (rows * width)


def kept_by_a_layer(kind, dtype, layout="padded", lora=None):
    models = (model_of(config_of(kind, num_hidden_layers=layers), dtype, layout, lora) for layers in (3, 2))
    longer, shorter = (kept_bytes(model, layout) for model in models)
    return longer - shorter


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", PASSED)
def test_a_layer_saves_the_counted_bytes(kind, dtype, layout):
    shape = architecture(config_of(kind))
    counted = memory.layer_activation_bytes(shape, DTYPES[dtype], by_sequence=layout == "packed")
    assert counted == kept_by_a_layer(kind, dtype, layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lora", [ALL, DROPPED], ids=["plain", "with dropout"])
def test_an_adapted_layer_saves_no_more_than_the_counted_bytes(lora, dtype):
    shape, measured = architecture(config_of()), kept_by_a_layer(UNTIED, dtype, lora=lora)
    saved, _ = adapter_activation_bytes(shape, lora, DTYPES[dtype])
    counted = memory.layer_activation_bytes(shape, DTYPES[dtype], by_sequence=False) + saved / shape.num_layers
    assert measured <= counted < 1.25 * measured


def peak_of(tracker):
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


PLACES = {"fullest in a layer": (64, False), "in the head": (8192, False), "at two temperatures": (8192, True)}
F32, BF16 = torch.float32, torch.bfloat16
# `test_a_layer_saves_the_counted_bytes` has every layout in every type
PASSES = [("padded", None, F32), ("packed", None, F32), ("padded", ALL, F32), ("padded", None, BF16)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "lora", "dtype"), PASSES)
@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(("vocabulary", "untempered"), PLACES.values(), ids=PLACES)
def test_the_estimate_bounds_the_peak_of_a_pass(
    vocabulary, untempered, checkpointing, dtype, layout, lora, monkeypatch
):
    config = config_of(vocab_size=vocabulary)
    model, tokens, chunk = model_of(config, dtype, layout), 4 * 256, 128
    adapter = None if lora is None else Adapter(model, lora, seed=0)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = PolicyModel(model, 0.7, chunk)
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    tracker = MemTracker()
    if adapter is None:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
    else:
        name, track = "_track_module_params_and_buffers", tracker._track_module_params_and_buffers
        # A frozen weight takes no hook; the hooks only tell gradients apart from other tensors.
        monkeypatch.setattr(tracker, name, lambda module, install_grad_hooks: track(module, False))
    ids_BT, position_BT, response_BT, bounds = inputs(4, 256, layout)
    tracker.track_external(policy)
    with tracker:
        scores = policy(ids_BT % vocabulary, position_BT, response_BT, bounds, "gradient", untempered)
        sum(score_BT.sum() for score_BT in scores).backward()
    measured = peak_of(tracker) - sum(parameter.nbytes for parameter in [*model.parameters(), *trained])

    shape, size = architecture(config), DTYPES[dtype]
    kept, one_layer = memory.activation_bytes(shape, size, checkpointing=checkpointing, by_sequence=layout == "packed")
    if lora is not None:
        saved, transient = adapter_activation_bytes(shape, lora, size)
        kept, one_layer = (kept, one_layer + saved // 3) if checkpointing else (kept + saved, one_layer)
        one_layer += transient
    how = {"compiled": False, "untempered": untempered, "frozen": lora is not None}
    estimated = tokens * kept + max(tokens * one_layer, sum(memory.head_bytes(shape, size, tokens, chunk, **how)))
    assert 0.98 * measured <= estimated <= (1.2 if lora is None else 1.4) * measured


@pytest.mark.slow
@pytest.mark.parametrize(  # fullest in its prompts, twice, and in its sampler
    ("prompt", "vocabulary", "dtype"), [(256, 64, F32), (256, 64, BF16), (8, 8192, F32)]
)
def test_the_estimate_bounds_the_peak_of_the_embedded_engine(prompt, vocabulary, dtype, monkeypatch):
    response = 2
    config = config_of(vocab_size=vocabulary)
    engine = transformers_engine.TransformersEngine(loaded(config, dtype).eval(), batch_size=8)
    prompts = [[token % vocabulary for token in range(i, prompt - i % 2 + i)] for i in range(8)]
    requests = [RolloutRequest(tuple(ids), seed=i) for i, ids in enumerate(prompts)]
    tracker, next_logits = MemTracker(), engine._next_logits

    def forgetting_modules(*arguments):
        tracker.reset_mod_stats()  # it refuses a second pass through a module that it remembers
        return next_logits(*arguments)

    monkeypatch.setattr(engine, "_next_logits", forgetting_modules)
    monkeypatch.setattr(transformers_engine, "_LARGE", 2**62)  # weights are packed on CPUs alone
    tracker.track_external(engine.model)
    with tracker:
        engine.generate(requests, SamplingParams(0.7, response, stop_token_ids=(), top_p=0.9))
    measured = peak_of(tracker) - sum(parameter.nbytes for parameter in engine.model.parameters())

    chosen = ["evaluation.engine=transformers", "execution.vllm.engines=1", "execution.rollout_batch_size=8"]
    chosen += [f"data.max_prompt_tokens={prompt}", f"evaluation.max_response_tokens={response}"]
    embedded = experiment(*chosen, f"model.dtype={str(dtype).removeprefix('torch.')}")
    (found,) = generation_memory(architecture(config), embedded, None, ("evaluate",))
    estimated = sum(part.gib for part in found.components if part.name not in ("weights", "process")) * GIB
    assert 0.99 * measured <= estimated <= 1.6 * measured


# ---- measured: what DeepSpeed holds ----

WIDE = {"hidden_size": 256, "intermediate_size": 1024}
LORA = "model.lora={rank: 64, alpha: 64}"


def live_tensors():
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]


def state_bytes(zero_stage, dtype, lora):
    """What DeepSpeed on one rank holds of a model between a backward pass and the next, buckets aside."""
    before = live_tensors()  # held, so that their places are not taken by others
    model = model_of(config_of(**WIDE), getattr(torch, dtype))
    adapter = None if lora is None else Adapter(model, lora, seed=0)  # held like the model
    execution = ExecutionConfig(zero_stage=zero_stage)
    policy = PolicyModel(model, 1.0, 64)
    engine = deepspeed_engine.start_engine(policy, OptimizerConfig(lr=1e-3), execution, dtype)
    batch = (*inputs(2, 8), "gradient")
    engine.backward(engine(*batch)[0].sum())
    engine.step()
    engine.backward(engine(*batch)[0].sum())
    gradients = [parameter.grad for parameter in model.parameters()]
    held = storages(live_tensors() + [gradient for gradient in gradients if gradient is not None])
    old = storages(before)
    del adapter
    return sum(size for place, size in held.items() if place not in old)


def estimated_states(shape, config):
    """Bytes of weights, gradients and optimizer states on one rank, without what ZeRO 3 gathers for a time."""
    trainer = estimate_memory(shape, config, None)[0]
    states = sum(trainer.gib(name) for name in ("weights", "gradients", "optimizer")) * GIB
    lora, size = config.model.lora, {"float32": 4, "bfloat16": 2}[config.model.dtype]
    parameters = shape.num_parameters + (adapter_parameters(shape, lora) if lora is not None else 0)
    return states - (size * parameters if config.execution.zero_stage == 3 else 0)


STATES = [
    *((stage, dtype, ()) for dtype in ("float32", "bfloat16") for stage in range(dtype == "bfloat16", 4)),
    *((stage, "float32", (LORA,)) for stage in (0, 2)),
    *((stage, "bfloat16", (LORA,)) for stage in (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "dtype", "lora"), STATES)
def test_deepspeed_holds_the_counted_states(zero_stage, dtype, lora, monkeypatch):
    monkeypatch.setattr(deepspeed_engine, "_REDUCE_BUCKET", 1000)  # so that it does not show
    alone = (f"execution.zero_stage={zero_stage}", f"model.dtype={dtype}", "execution.ray.trainer_ranks=1")
    config, shape = experiment(*alone, *lora), architecture(config_of(**WIDE))
    measured = state_bytes(zero_stage, dtype, config.model.lora)
    assert estimated_states(shape, config) == pytest.approx(measured, rel=0.03 if lora else 0.02)
    if lora:  # a missing adapter would be noticed
        assert measured < 0.7 * estimated_states(shape, experiment(*alone))


# ---- a model of 7 B, by hand ----

QWEN_7B = architecture_of(ModelConfig(path="Qwen/Qwen2.5-Math-7B"))
P, LIVE = 7_615_616_512, 1_050_000_000
"""Parameters of the model of 7 B, and those that DeepSpeed gathers at a time of each model under ZeRO 3."""
FACTORS = 28 * 32 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944))
"""Of an adapter of rank 32: q and o, k and v, gate, up and down."""
PER_TOKEN = 2 * 28 * 4 * 128 * 2 / GIB
"""GiB of keys and values of a token in bfloat16."""
ADAPTED = "model.lora={rank: 32, alpha: 64}"
TEACHER = "rl.teachers={teacher: {kind: model, path: Qwen/Qwen2.5-1.5B, dtype: float32}}"
TWO_TEACHERS = (
    "rl.teachers={half: {kind: model, path: Qwen/Qwen2.5-1.5B, dtype: bfloat16, rows: {outcome: wrong}}, "
    "whole: {kind: model, path: Qwen/Qwen2.5-1.5B, dtype: float32}}"
)
TERM = "{{name: {0}, select: on_policy, loss: {1}, normaliser: {{mode: token, population: own}}}}"
DISTILLED = TERM.format("distillation", "{kind: distillation}")
KL = f"objective.terms=[{DISTILLED}, {TERM.format('kl', '{kind: kl, estimator: k3}')}]"
FOLLOWS = "rl.reference={refresh_every: 10}"
REFERENCE, SHARDED = "method=reinforce_pp", "execution.zero_stage=3"


def experiment(*overrides):
    return load_experiment(SEVEN_B, ["execution.ray.placement=disaggregated", *overrides])


OWN_COPY = {"frozen teacher": 0, "frozen reference": 2 * P}
TRAINERS = [
    ((), {"weights": 2 * P, "gradients": 4 * P / 8, "optimizer": 12 * P / 8}),
    (("execution.zero_stage=1",), {"weights": 2 * P, "gradients": 4 * P, "optimizer": 12 * P / 8}),
    (("execution.offload_optimizer=true",), {"weights": 2 * P, "gradients": 0, "optimizer": 0}),
    (("execution.logprob_chunk_tokens=8192",), {"logits": 8192 * 152064 * 12}),
    (("execution.logprob_chunk_tokens=65536", "execution.compile=true"), {"logits": 16384 * 152064 * 4}),
    ((ADAPTED,), {"weights": 2 * (P + FACTORS), "gradients": 4 * FACTORS / 8, "optimizer": 12 * FACTORS / 8}),
    ((REFERENCE,), {"frozen reference": 2 * P}),
    ((REFERENCE, ADAPTED), {"frozen reference": 0}),  # it is the policy without the adapter
    (("method=opd", TEACHER), {"frozen teacher": 4 * 1_543_714_304, "frozen reference": 0}),
    (("method=opd", TWO_TEACHERS), {"frozen teacher": 4 * 1_543_714_304}),  # they take turns
    (("method=opd", TWO_TEACHERS, SHARDED), {"frozen teacher": (4 + 2) * (1_543_714_304 / 8 + LIVE)}),
    (("method=opsd",), OWN_COPY),
    (("method=opsd", ADAPTED), dict.fromkeys(OWN_COPY, 0)),
    (("method=opsd", KL), {"frozen reference": 2 * P, "moving reference": 0}),
    (("method=opsd", KL, FOLLOWS), {"frozen reference": 2 * P, "moving reference": 2 * P}),
    (("method=sdpg",), {"frozen reference": 2 * P, "moving teacher": 0}),  # the policy itself teaches
    (("method=sdft",), {"frozen reference": 0, "moving teacher": 2 * P}),
    ((REFERENCE, SHARDED), dict.fromkeys(("weights", "frozen reference"), 2 * (P / 8 + LIVE))),
    ((REFERENCE, SHARDED, FOLLOWS), {"frozen reference": 0, "moving reference": 2 * P}),
    (("method=ppo", "rl.critic={optimizer: {lr: 1e-5}}"), {"critic weights": 2 * (P - 152064 * 3584 + 3585)}),
]


@pytest.mark.parametrize(("overrides", "parts"), TRAINERS)
def test_the_parts_of_a_trainer_of_7b_by_hand(overrides, parts):
    trainer = estimate_memory(QWEN_7B, experiment(*overrides), 79.0)[0]
    assert {name: trainer.gib(name) * GIB for name in parts} == pytest.approx(parts)
    assert trainer.total_gib == pytest.approx(sum(part.gib for part in trainer.components))


ROOM = (1024 + 8192) * PER_TOKEN
ASKING = ("difficulty={engine: vllm, max_response_tokens: 16384}", "evaluation.max_response_tokens=4096")
SECOND_ROUND = "objective.group.starts.critique.show.max_prompt_tokens"
THREE = ("execution.vllm={engines: 3, tensor_parallel_size: 2}",)
HALVED = {"weights": P / GIB, "total": 0.55 * 79}


ENGINES = [
    # An engine gives the rest of its share to the cache.
    (("execution.vllm.gpu_memory_utilization=0.9",), 79.0, "rl", 8, {"total": 0.9 * 79, "limit": 0.9 * 79}),
    (("execution.vllm.tensor_parallel_size=2",), None, "rl", 16, {"weights": P / GIB, "KV cache": ROOM / 2}),
    # Key heads are repeated where there are fewer than GPUs.
    (("execution.vllm.tensor_parallel_size=4",), None, "rl", 32, {"KV cache": ROOM / 4}),
    (("execution.vllm.tensor_parallel_size=28",), None, "rl", 224, {"KV cache": ROOM / 4}),
    ((ADAPTED,), None, "rl", 8, {"adapter": 2 * FACTORS / GIB}),
    (("model.lora={rank: 20, alpha: 64}",), None, "rl", 8, {"adapter": 2 * FACTORS / GIB}),
    ((ADAPTED, "execution.vllm.adapter=merged"), None, "rl", 8, {"adapter": 0}),
    # It has room for the longest response of its own stage.
    (ASKING, None, "rl", 8, {"KV cache": ROOM}),
    (ASKING, None, "evaluate", 8, {"KV cache": (1024 + 4096) * PER_TOKEN}),
    (ASKING, None, "difficulty", 8, {"KV cache": (1024 + 16384) * PER_TOKEN}),
    # And for the prompts of a second round.
    (("method=lte", f"{SECOND_ROUND}=null"), None, "rl", 8, {"KV cache": (1024 + 8192 + 8192) * PER_TOKEN}),
    (("method=lte", f"{SECOND_ROUND}=2048"), None, "rl", 8, {"KV cache": (2048 + 8192) * PER_TOKEN}),
    (THREE, 79.0, "evaluate", 6, HALVED),
    (THREE, 79.0, "sweep", 6, HALVED),
]


@pytest.mark.parametrize(("overrides", "gpu_gib", "stage", "count", "parts"), ENGINES)
def test_the_parts_of_an_engine_of_7b_by_hand(overrides, gpu_gib, stage, count, parts):
    config = experiment(*overrides)
    if stage == "rl":
        engine = memory.rl_engine_memory(QWEN_7B, config, gpu_gib)
    else:
        (engine,) = generation_memory(QWEN_7B, config, gpu_gib, (stage,))
        assert engine.name == f"GPU in {'difficulty' if stage == 'difficulty' else 'evaluation'}"
    totals = {"total": engine.total_gib, "limit": engine.limit_gib}
    found = {name: totals[name] if name in totals else engine.gib(name) for name in parts}
    assert (engine.count, found) == (count, pytest.approx(parts))


def test_colocated_the_trainer_stays_and_the_engine_sleeps():
    rollout, update = estimate_memory(QWEN_7B, load_experiment(SEVEN_B), 79.0)
    assert rollout.gib("weights") == update.gib("weights") == pytest.approx(rollout.gib("engine weights"))
    assert rollout.gib("gradients") == rollout.gib("logits") == 0
    assert update.gib("engine KV cache") == 0 < update.gib("engine, asleep")
    sharded = estimate_memory(QWEN_7B, load_experiment(SEVEN_B, ["execution.zero_stage=3"]), 79.0)[0]
    assert sharded.gib("gradients") > 0  # ZeRO 3 holds them in a buffer of its own


SFT = "sft={epochs: 1, batch_size: 64, optimizer: {lr: 5e-5}}"


def test_an_engine_kept_for_evaluations_counts_beside_training():
    def asleep(*overrides):
        config = load_experiment(SEVEN_B, ["execution.vllm.engines=1", *overrides])
        return {gpu.name: gpu.gib("kept engine, asleep") for gpu in estimate_memory(QWEN_7B, config, 79.0)}

    assert asleep() == {"shared GPU in a rollout": 2, "shared GPU in an update": 2}
    assert asleep("execution.vllm.engines=2") == asleep("evaluation.engine=transformers") == dict.fromkeys(asleep(), 0)
    local = asleep("cluster=local", "rl.engine=vllm", "chain=sft_then_rl", "rl.max_staleness=0", SFT)
    # RL has it in its own process.
    assert local == {"GPU in SFT": 2, "shared GPU in a rollout": 0, "shared GPU in an update": 0}


def test_an_engine_that_validates_sft_counts_beside_its_trainer():
    validated = ["cluster=local", "chain=sft", SFT, "sft.engine=vllm", "method=sft", "data.validation_prompts=64"]
    validated += ["sft.validation={every: 9, source: validation, max_response_tokens: 4096}"]
    validation, update = estimate_memory(QWEN_7B, load_experiment(SEVEN_B, validated), None)
    assert (validation.name, update.name) == ("shared GPU in a validation of SFT", "GPU in SFT")
    assert validation.gib("weights") == pytest.approx(validation.gib("engine weights"))
    assert validation.gib("engine KV cache") == pytest.approx((1024 + 4096) * PER_TOKEN)
    assert validation.gib("logits") == 0 < validation.gib("optimizer") == update.gib("optimizer")
    assert 0 < update.gib("engine, asleep") < 1  # of the process only what the trainer's has not anyway


def test_a_reward_model_counts_on_the_gpus_of_the_stages_that_it_scores_in(tmp_path):
    folder = reward_folder(tmp_path)
    parameters = sum(each.numel() for each in load_file(folder / "model.safetensors").values())
    reward = f"grading.kind={{kind: reward_model, path: '{folder}', correct_from: 0.0, dtype: bfloat16}}"
    colocated = load_experiment(SEVEN_B, [reward])
    for gpu in estimate_memory(QWEN_7B, colocated, 79.0):
        assert gpu.gib("reward model") * GIB == pytest.approx(2 * parameters, rel=0.1)
        assert gpu.gib("its layer") * GIB > colocated.execution.micro_batch_tokens * 64 * 4 * 2  # the MLP of width 64
    alone, both = generation_memory(QWEN_7B, colocated, 79.0, ("evaluate",))
    assert alone.gib("reward model") == 0 and alone.limit_gib == pytest.approx(0.55 * 79)
    assert (both.name, both.limit_gib) == ("GPU in evaluation with a reward model", 79.0)
    assert both.total_gib > alone.total_gib
    on_cpu = load_experiment(SEVEN_B, [reward, "execution.reward_device=cpu"])
    assert not any(gpu.gib("reward model") for gpu in estimate_memory(QWEN_7B, on_cpu, 79.0))
    for config, expected in ((colocated, [1, 0, 8, 8]), (on_cpu, [0, 0, 8, 8])):
        assert [gpus_of_stage(config, stage) for stage in ("prepare_data", "base", "rl", "evaluate")] == expected
    endpoint = ["model={architecture: null, endpoint: {name: m}}", "base=null", "data.corpus=null"]
    endpoint += [
        "evaluation.engine=openai",
        "execution.server.urls=[http://a]",
        "stages=[prepare_data, base, evaluate]",
    ]
    assert gpus_of_stage(load_experiment("smoke", [reward, *endpoint]), "evaluate") == 1
