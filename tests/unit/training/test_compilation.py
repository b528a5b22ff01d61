"""execution.compile: the same gradients from code that is compiled once, plain generation, and what it refuses.

All tests take models of one class, which share their code.
"""

import functools
from random import Random

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from reference.attention_case import LENGTHS, batch_of, rows_of
from reference.gradient_case import OPTIMIZER, execution, make_batch, reference_step, relative_l2, step_of, tiny_model
from support.installed import needs_compiler
from support.refusals import refused
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import PreTrainedModel

from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training import policy_model, update_metrics
from luffy.training.attention import compile_layers
from luffy.training.policy import FrozenPolicy, Policy
from luffy.training.update_metrics import process_metrics

pytestmark = pytest.mark.slow
LAYOUTS = (
    {"micro_batch_tokens": 10_000},
    {"micro_batch_tokens": 40, "packing": True},
    {"micro_batch_tokens": 10_000, "gradient_checkpointing": True},
)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("luffy")]


@functools.cache
def start() -> PreTrainedModel:
    """What every layout starts from, so that the reference is computed once."""
    return tiny_model()


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.parametrize("layout", LAYOUTS, ids=["padded", "packed", "gradient_checkpointing"])
def test_gradients_equal_the_float64_reference(layout: dict[str, object]) -> None:
    policy = Policy(tiny_model(), OPTIMIZER, execution(compile=True, **layout), "float32")
    assert num_compiled() > 0
    policy.accumulate(make_batch("luffy", start()), step_of("luffy"))
    gradients, parameters = reference_step("luffy", start())
    named = dict(policy.causal_lm.named_parameters())
    assert relative_l2({name: safe_get_full_grad(parameter) for name, parameter in named.items()}, gradients) < 1e-5
    policy.engine.step()
    assert relative_l2({name: parameter.detach() for name, parameter in named.items()}, parameters) < 1e-5


@needs_compiler
@pytest.mark.parametrize(("packing", "most"), [(True, 11), (False, 19)])
def test_micro_batches_of_many_lengths_share_a_few_graphs(
    packing: bool, most: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Four graphs of a layer to train and four to score, padded also for a single row, and three of the head."""
    torch._dynamo.reset()
    counters.clear()
    random, metrics = Random(0), {}
    policy = Policy(tiny_model(), OPTIMIZER, execution(compile=True, packing=packing, micro_batch_tokens=40), "float32")
    for number in range(24):
        # Every seventh time another rank has one micro-batch more.
        extra = int(number % 7 == 3)
        monkeypatch.setattr(policy_model, "max_over_ranks", lambda value, extra=extra: value + extra)
        lengths = [(random.randint(1, 6), random.randint(1, 20)) for _ in range(random.choice([1, 1, 2, 3, 5, 9]))]
        batch = batch_of(rows_of(lengths, seed=number))
        policy.logprobs(batch) if number % 2 else policy.accumulate(batch, step_of("luffy"))
        metrics = process_metrics()
    assert metrics["perf/compiled_graphs"] == num_compiled() <= most
    assert not warnings_of(caplog)
    monkeypatch.setattr(update_metrics, "MOST_GRAPHS", most - 1)
    for _ in range(2):
        process_metrics()
    (warning,) = warnings_of(caplog)
    assert f"more than {most - 1} graphs" in warning and "use execution.compile: false" in warning
    update_metrics._warn_of_graphs.cache_clear()


@needs_compiler
def test_a_frozen_model_is_compiled_too() -> None:
    before, batch = num_compiled(), batch_of(rows_of(LENGTHS))
    compiled, plain = (FrozenPolicy(tiny_model(), execution(compile=each), 1.0) for each in (True, False))
    assert torch.allclose(compiled.logprobs(batch), plain.logprobs(batch), atol=2e-5)
    assert num_compiled() > before


@needs_compiler
def test_generation_runs_uncompiled_and_training_goes_on_compiled() -> None:
    policies = [Policy(tiny_model(), OPTIMIZER, execution(compile=each), "float32") for each in (True, False)]
    requests = [RolloutRequest(prompt_ids=(2, 3, 4), seed=seed) for seed in range(3)]
    params = SamplingParams(temperature=1.0, max_response_tokens=8, stop_token_ids=(1,))
    Policy(tiny_model(), OPTIMIZER, execution(compile=True), "float32").update(
        batch_of(rows_of(LENGTHS)), step_of("sft"), 0.0
    )
    before, responses = num_compiled(), []
    for policy in policies:
        with policy.inference_model() as model:
            responses.append(TransformersEngine(model, 4).generate(requests, params))
    assert responses[0] == responses[1]
    for policy in policies:
        policy.accumulate(batch_of(rows_of(LENGTHS)), step_of("sft"))
    assert num_compiled() == before
    compiled, plain = (
        {name: safe_get_full_grad(parameter) for name, parameter in policy.causal_lm.named_parameters()}
        for policy in policies
    )
    assert relative_l2(compiled, plain) < 1e-5


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models say that they are on a GPU; they compute here."""
    monkeypatch.setattr(PreTrainedModel, "device", torch.device("cuda"))


@needs_compiler
def test_without_a_setting_layers_are_compiled_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    before, batch = num_compiled(), batch_of(rows_of(LENGTHS))
    FrozenPolicy(tiny_model(), execution(), 1.0).logprobs(batch)
    assert num_compiled() == before and compile_layers(tiny_model(), execution()).compile is False
    torch._dynamo.reset()
    on_a_gpu(monkeypatch)
    assert compile_layers(tiny_model(), execution()).compile is True and num_compiled() > before
    assert compile_layers(tiny_model(), execution(zero_stage=3)).compile is False


def test_without_a_setting_and_a_compiler_layers_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert compile_layers(tiny_model(), execution()).compile is False
    (warning,) = warnings_of(caplog)
    assert warning.startswith("layers run uncompiled. execution.compile: TORCHDYNAMO_DISABLE=1")


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE", None])
def test_where_nothing_can_be_compiled_it_is_refused(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    if variable is None:
        model._no_split_modules = None
    else:
        monkeypatch.setenv(variable, "1")
    with refused("execution.compile", f"{variable}=1" if variable else "does not name its layers"):
        compile_layers(model, execution(compile=True))


def test_a_missing_compiler_is_one_line() -> None:
    """The last test of this file: what the others have compiled is forgotten."""
    missing = torch._inductor.config.patch("cpp.cxx", (None, "/nonexistent/g++"))  # as by the variable CXX
    torch._dynamo.reset()
    with missing, fresh_cache(), refused("execution.compile", "apt-get install g++", "compile: false"):
        compile_layers(tiny_model(), execution(compile=True))
    torch._dynamo.reset()
