"""execution.compile: the same gradients from code that is compiled once, plain generation, and what it refuses.

All tests take models of one class, which share their code.
"""

import functools

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from installed import needs_compiler
from reference.attention_case import batch_of, rows_of
from reference.gradient_case import OPTIMIZER, execution, make_batch, reference_step, relative_l2, step_of, tiny_model
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from transformers import PreTrainedModel

from luffy.errors import ConfigError, DataError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.attention import compile_layers
from luffy.training.policy import FrozenPolicy, Policy

pytestmark = pytest.mark.slow
LAYOUTS = (
    {"micro_batch_tokens": 10_000},
    {"micro_batch_tokens": 40, "packing": True},
    {"micro_batch_tokens": 10_000, "gradient_checkpointing": True},
)
LENGTHS = ((3, 9), (1, 1), (6, 2), (2, 17), (4, 4))


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
def test_other_sizes_are_not_compiled_again() -> None:
    layout = {"micro_batch_tokens": 10_000, "compile": True}
    policy = Policy(tiny_model(), OPTIMIZER, execution(**layout), "float32")
    policy.accumulate(batch_of(rows_of(LENGTHS)), step_of("sft"))
    before = num_compiled()
    for lengths in (((5, 5), (4, 6)), ((2, 30), (7, 7), (1, 12)), ((1, 3),) * 9):
        policy.accumulate(batch_of(rows_of(lengths)), step_of("sft"))
    assert num_compiled() == before


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


@pytest.mark.parametrize("variable", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_where_the_compiler_is_turned_off_it_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=rf"^execution\.compile: {variable}=1 turns torch\.compile off"):
        compile_layers(tiny_model(), execution(compile=True))


def test_a_model_that_does_not_name_its_layers_is_refused() -> None:
    model = tiny_model()
    model._no_split_modules = None
    with pytest.raises(DataError, match=r"^execution\.compile: .* does not name its layers"):
        compile_layers(model, execution(compile=True))


def test_a_missing_compiler_is_one_line() -> None:
    """The last test of this file: what the others have compiled is forgotten."""
    missing = torch._inductor.config.patch("cpp.cxx", (None, "/nonexistent/g++"))  # as by the variable CXX
    torch._dynamo.reset()
    with missing, fresh_cache(), pytest.raises(ConfigError) as refused:
        compile_layers(tiny_model(), execution(compile=True))
    said = str(refused.value)
    assert said.startswith("execution.compile: ") and "\n" not in said
    assert "apt-get install g++" in said and "compile: false" in said
    torch._dynamo.reset()
