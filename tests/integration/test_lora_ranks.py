"""A LoRA adapter on two ranks: the reference's step, the weights of one rank, and resumption on other ranks."""

from pathlib import Path

import pytest
from reference.gradient_case import relative_l2, tiny_model
from reference.lora_case import assert_resumed_as_if_undisturbed, resume_and_go_on, write_and_go_on
from reference.ray_case import movement, weights_in
from reference.sft_case import ENDS_AFTER, PLAN, sft
from support.ranks import on_ranks
from torch import Tensor

pytestmark = pytest.mark.slow
ZERO: list[dict[str, object]] = [
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True},
    {"zero_stage": 3, "offload_parameters": True},
    {"zero_stage": 1, "sequence_parallel": 2},
]
LAYOUTS = [(0, 0), (2, 2), (3, 3), (2, 0), (3, 1)]
"""ZeRO when written and when resumed."""


def test_two_ranks_give_the_reference_gradient_and_step(tmp_path):
    found = on_ranks("adapter_steps", ZERO, tmp_path)
    assert len(found) == len(ZERO) + 2
    for case, errors in found.items():
        assert errors["gradient"] < 1e-5, (case, errors)
        assert errors["movement"] < 1e-3, (case, errors)
        assert errors["exported"] < 1e-5, (case, errors)
        assert errors["reference"] < 1e-5, (case, errors)


def test_a_checkpoint_of_two_ranks_resumes_on_one(tmp_path):
    stages = [(tmp_path / f"{written}_{read}", written, read) for written, read in LAYOUTS]
    on_ranks("write_adapters", [at[:2] for at in stages])
    for stage, _, read in stages:
        resume_and_go_on(stage, read)
        assert_resumed_as_if_undisturbed(stage)


def test_a_checkpoint_of_one_rank_resumes_on_two(tmp_path):
    stages = [(tmp_path / f"{written}_{read}", written, read) for written, read in LAYOUTS]
    for stage, written, _ in stages:
        write_and_go_on(stage, written)
    on_ranks("resume_adapters", [(stage, read) for stage, _, read in stages])
    for stage, _, _ in stages:
        assert_resumed_as_if_undisturbed(stage)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    start = tmp_path_factory.mktemp("start")
    tiny_model().save_pretrained(start)
    return start


@pytest.fixture(scope="module")
def moved_alone(tmp_path_factory, start) -> dict[str, Tensor]:
    """How far SFT of an adapter on one rank moves each merged weight."""
    out = tmp_path_factory.mktemp("alone")
    sft(start, out, rank=4, zero_stage=0)
    return movement(out / "model", start)


def test_sft_of_an_adapter_learns_on_two_ranks_what_it_learns_on_one(tmp_path, start, moved_alone):
    cases = [{"zero_stage": 1}, {"zero_stage": 2, "packing": True}, {"zero_stage": 3, "micro_batch_tokens": 40}]
    runs = [{"model": start, "out": tmp_path / str(i), "rank": 4, **case} for i, case in enumerate(cases)]
    on_ranks("supervised", runs)
    assert moved_alone["model.layers.0.mlp.up_proj.weight"].any() and not moved_alone["lm_head.weight"].any()
    for run in runs:
        assert relative_l2(movement(Path(str(run["out"])) / "model", start), moved_alone) < 1e-3


def test_an_interrupted_adapter_resumes_on_a_different_number_of_ranks(tmp_path, start, moved_alone):
    resumed_at, out = ENDS_AFTER - 1, tmp_path / "two"
    on_ranks("supervised", [{"model": start, "out": out, "rank": 4, "zero_stage": 2, "ends": True}])
    assert len(sft(start, out, start=resumed_at, rank=4, zero_stage=0)) == PLAN.steps - resumed_at
    assert relative_l2(movement(out / "model", start), moved_alone) < 1e-3
    assert set(weights_in(out / "model")) == set(weights_in(start))
