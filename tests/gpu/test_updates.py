"""Updates in bfloat16 as they run by themselves on a GPU: compiled graphs, distance to the engine, peak memory.

Prints MFU, and the mean gap between the log-probabilities of the embedded engine and of the trainer.
"""

import time
from collections.abc import Iterator

import pytest
import torch
from benchmarks.gpu_update import CHECKPOINTING, PACKED, RESPONSE_TOKENS, SHAPES, TOKENS, batch, measure
from reference.gradient_case import step_of
from transformers import Qwen2Config, Qwen2ForCausalLM

from luffy.config.execution import ExecutionConfig
from luffy.config.training import OptimizerConfig
from luffy.rl.loop import suspicious_gap
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.batching import collate
from luffy.training.policy import Policy
from luffy.training.ranks import device, init_process_group
from luffy.training.supervised import demonstration
from luffy.training.update_metrics import MOST_GRAPHS, device_peak, process_metrics

NUM_ROWS = (24, 24, 17, 40, 1, 32)
"""Of each update, the first two not counted; their lengths differ, too."""


def policy_of(config: Qwen2Config, **settings: object) -> Policy:
    torch.manual_seed(0)
    with torch.device(device()):
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    return Policy(model, OptimizerConfig(lr=1e-6), ExecutionConfig(zero_stage=1, **settings), "bfloat16")


def updates(policy: Policy, config: Qwen2Config) -> Iterator[tuple[float, float, float]]:
    """For each: the graphs that are compiled by then, its seconds, and its operations."""
    for num_rows in NUM_ROWS:
        rows = batch(config, num_rows)
        began = time.perf_counter()
        policy.update(rows, step_of("on_policy"), 1e-6)
        policy.logprobs(rows)
        lengths, scored = rows.row_lengths, rows.num_scored
        flops = policy.flops.training(lengths, scored) + policy.flops.forward(lengths, scored)
        yield process_metrics()["perf/compiled_graphs"], time.perf_counter() - began, flops


def mean_gap(policy: Policy, vocabulary: int) -> float:
    """Between engine and trainer, in nats, over sampled tokens."""
    prompts = [tuple((7 * row + place) % vocabulary for place in range(32)) for row in range(16)]
    with policy.inference_model() as model:
        requests = [RolloutRequest(prompt, seed=seed) for seed, prompt in enumerate(prompts)]
        found = TransformersEngine(model, 16).generate(requests, SamplingParams(1.0, 128, ()))
    rows = [demonstration(prompt, each.token_ids) for prompt, each in zip(prompts, found, strict=True)]
    made = collate(rows, torch.zeros(len(rows)), 0)
    sampled = torch.tensor([logp for each in found for logp in each.logprobs])
    return float((policy.logprobs(made)[made.response_mask_BT] - sampled).abs().mean())


def test_nothing_is_compiled_again_after_the_first_updates(capsys: pytest.CaptureFixture[str]) -> None:
    before = process_metrics().get("perf/compiled_graphs", 0.0)
    policy = policy_of(SHAPES["0.5B"])
    graphs, seconds, flops = zip(*updates(policy, SHAPES["0.5B"]), strict=True)
    assert before < graphs[1] == graphs[-1] <= before + MOST_GRAPHS
    peak = device_peak()
    mfu = "" if peak is None else f", MFU {sum(flops[2:]) / sum(seconds[2:]) / peak:.1%}"
    with capsys.disabled():
        print(f"\n0.5B: {graphs[-1] - before:.0f} graphs, {sum(seconds[2:]):.2f} s for four updates and scores{mfu}")


def test_engine_and_trainer_agree_in_bfloat16(capsys: pytest.CaptureFixture[str]) -> None:
    config = Qwen2Config(**{**SHAPES["0.5B"].to_dict(), "initializer_range": 0.05})  # far from uniform
    gap, bound = mean_gap(policy_of(config), config.vocab_size), suspicious_gap("bfloat16", staleness_bound=0)
    with capsys.disabled():
        print(f"\nmean gap of log-probabilities in bfloat16: {gap:.4f} nats (goal: 0.02)")
    assert bound is not None and 0 < gap < bound


MEASURED = {
    "ZeRO 1": (),
    "ZeRO 3, checkpointing": ("execution.zero_stage=3", CHECKPOINTING),
    "packed": (PACKED,),
    "offloaded": ("execution.offload_optimizer=true",),
}


@pytest.mark.parametrize("layout", MEASURED)
def test_the_estimate_of_memory_is_within_ten_per_cent_of_the_peak(layout: str) -> None:
    """Of two full micro-batches of eight rows: in the second one, gradients are there already."""
    init_process_group()
    rows = batch(SHAPES["0.5B"], 16, shortest=RESPONSE_TOKENS)
    found = measure("0.5B", (TOKENS(16_384), *MEASURED[layout]), rows)
    print(f"{layout}: estimated {found['estimate']:.2f} GiB, measured {found['peak']:.2f} GiB")
    assert found["peak"] <= found["estimate"] <= 1.1 * found["peak"]
