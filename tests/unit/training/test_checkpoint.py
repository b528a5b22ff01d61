"""Checkpoints: complete or not there, newest kept, and what is resumed is the same again, under another layout, too."""

import contextlib
import math
import os
import shutil
from itertools import pairwise
from pathlib import Path

import deepspeed
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference.elastic_case import (
    assert_resumed_as_if_undisturbed,
    assert_same_step,
    engines,
    full_weights,
    resume_and_go_on,
    take_step,
    trained,
    write_and_go_on,
)
from reference.lora_case import adapted_policy, base_model, factors
from support.refusals import refused
from synthetic.arithmetic import tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.execution import ExecutionConfig, TrackingConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.files import link_or_copy
from luffy.pipeline.graph import build_graph
from luffy.pipeline.job import JOB_FILE, StageJob, write_job
from luffy.training import checkpoint
from luffy.training.checkpoint import CheckpointStore, PieceKey, PieceReader, export_checkpoint, write_pieces
from luffy.training.model_folder import load_causal_lm


def _policy(zero_stage: int = 0) -> dict[str, deepspeed.DeepSpeedEngine]:
    return {"policy": trained(0, zero_stage=zero_stage)["policy"].engine}


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("kind", "zero_stage", "dtype", "offloads"),
    [
        *(("models", stage, "float32", stage == 2) for stage in (0, 2, 3)),
        *(("models", stage, "bfloat16", stage == 3) for stage in (1, 2, 3)),
        *(("adapter", stage, "float32", False) for stage in (0, 2, 3)),
        *(("adapter", stage, "bfloat16", False) for stage in (1, 2)),
    ],
)
def test_resumed_engines_continue_bit_for_bit(kind, zero_stage, dtype, offloads, tmp_path):
    settings = {"kind": kind, "zero_stage": zero_stage, "offload_optimizer": offloads}
    store, parts = CheckpointStore(tmp_path, keep=2), trained(0, dtype, **settings)
    take_step(parts)
    store.save(engines(parts), 1)
    for _ in range(3):  # bfloat16 weights hardly show what one step does to their masters
        take_step(parts)
    expected = full_weights(parts)
    parts = trained(9, dtype, **settings)
    assert store.load(engines(parts), 1) == {}
    for _ in range(3):
        take_step(parts)
    assert _equal(full_weights(parts), expected)


@pytest.mark.parametrize(
    ("kind", "written", "read"),
    [
        *(("models", *stages) for stages in ((0, 1), (1, 0), (2, 0), (3, 2), (0, 3), (2, 3))),
        *(("adapter", *stages) for stages in ((0, 2), (2, 0), (2, 3), (3, 1))),
    ],
)
def test_another_zero_stage_continues_with_the_same_weights_and_moments(kind, written, read, tmp_path):
    write_and_go_on(tmp_path, written, kind=kind)
    resume_and_go_on(tmp_path, read, kind=kind)
    assert_resumed_as_if_undisturbed(tmp_path)


@pytest.mark.parametrize("lost", ["exp_avg", "exp_avg_sq", "step"])
def test_a_step_without_something_of_adam_would_be_noticed(lost: str, tmp_path: Path) -> None:
    store, parts = CheckpointStore(tmp_path, keep=1), trained(0)
    for _ in range(2):
        take_step(parts)
    store.save(engines(parts), 1)
    before = full_weights(parts)
    take_step(parts)
    expected = full_weights(parts)
    store.load(engines(parts), 1)
    for state in parts["policy"].engine.optimizer.state.values():
        state[lost].zero_()
    take_step(parts)
    with pytest.raises(AssertionError, match="policy"):
        assert_same_step(before, full_weights(parts), expected)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_engines_that_never_stepped_come_back_without_moments(zero_stage: int, tmp_path: Path) -> None:
    store, parts = CheckpointStore(tmp_path, keep=1), trained(0, zero_stage=zero_stage)
    before = full_weights(parts)
    store.save(engines(parts), 1)
    take_step(parts)
    expected = full_weights(parts)
    store.load(engines(parts), 1)
    assert _equal(full_weights(parts), before)
    take_step(parts)
    assert _equal(full_weights(parts), expected)


@pytest.mark.parametrize(("fused", "device"), [(None, "cpu"), (True, "meta")])
def test_the_step_count_of_adam_comes_back_to_where_its_kernel_reads_it(fused, device, tmp_path):
    """The meta device stands for a GPU, whose fused kernel refuses a count on the CPU."""
    kinds = {"weight": torch.ones(4), "exp_avg": torch.ones(4), "exp_avg_sq": torch.ones(4), "step": torch.tensor(3.0)}
    write_pieces(tmp_path, 0, {"w": (4,)}, [(PieceKey(kind, 0, "w"), tensor) for kind, tensor in kinds.items()])
    flat = torch.zeros(4, device="meta", requires_grad=True)
    adamw = torch.optim.AdamW([flat], fused=fused)
    checkpoint._read(PieceReader(tmp_path), flat, [checkpoint._Piece("w", 0, 4, flat, 0)], adamw)
    assert {name: tensor.device.type for name, tensor in adamw.state[flat].items()} == {
        "exp_avg": "meta", "exp_avg_sq": "meta", "step": device,
    }  # fmt: skip


def test_a_critic_beside_it_does_not_change_the_policy() -> None:
    both, alone = trained(0), trained(0)
    for _ in range(2):
        take_step(both)
        take_step({"policy": alone["policy"], "critic": trained(5)["critic"]})
    assert _equal(full_weights({"policy": both["policy"]}), full_weights({"policy": alone["policy"]}))


def kept(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def test_the_newest_stay_with_the_exact_state_of_their_stage_and_an_incomplete_one_never_counts(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=2), _policy()
    state = {"controller": 0.1 + 0.2, "replay": {"uid": [{"ids": [3, 1], "logp": [-1e-17, -math.pi]}]}, "none": None}
    assert store.newest() is None
    for step in (10, 20, 30):
        store.save(policy, step, state)
    assert kept(tmp_path) == [20, 30] and store.load(policy, 30) == state
    (tmp_path / "checkpoints" / "step_000030" / "COMPLETE").unlink()
    assert store.newest() == 20
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint"):
        store.load(policy, 30)


def test_an_extra_checkpoint_takes_no_place_of_the_schedule_and_goes_with_the_next(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=2), _policy()
    for step in (10, 20):
        store.save(policy, step)
    for step in (23, 27):
        store.save(policy, step, is_extra=True)
        assert kept(tmp_path) == [10, 20, step]
    store.load(policy, 27)
    store.save(policy, 30)
    assert kept(tmp_path) == [20, 30]


def test_a_complete_checkpoint_is_never_replaced_but_what_a_kill_left_goes(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=1), _policy()
    left, later = (tmp_path / "checkpoints" / f"step_00000{step}" / "policy" for step in (6, 9))
    for folder in (left, later):
        folder.mkdir(parents=True)
    (left / "rank_0007_0000.safetensors").touch()
    store.save(policy, 6)
    assert kept(tmp_path) == [6]
    store.load(policy, 6)
    with pytest.raises(AssertionError, match="step 6 does not come after the checkpoint of step 6"):
        store.save(policy, 6)
    assert store.newest() == 6


def test_a_kill_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path, monkeypatch):
    store, parts, fsync = CheckpointStore(tmp_path, keep=1), trained(0), os.fsync
    store.save(engines(parts), 0, {"at": 0})
    survived = []
    for step in range(1, 40):  # each dies one write later than the one before
        left = step

        def dying_fsync(descriptor: int) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", dying_fsync)
        with contextlib.suppress(KeyboardInterrupt):
            store.save(engines(parts), step, {"at": step})
        monkeypatch.setattr(os, "fsync", fsync)
        newest = store.newest()
        assert newest is not None and store.load(engines(parts), newest) == {"at": newest}
        survived.append(newest)
    first_new = next(step for step, newest in enumerate(survived, 1) if newest == step)
    assert first_new > 5 and survived == [0] * (first_new - 1) + list(range(first_new, 40))


def test_other_engines_another_model_and_a_broken_or_lost_file_are_told(tmp_path: Path) -> None:
    store, parts = CheckpointStore(tmp_path, keep=1), trained(0, zero_stage=2)
    store.save({"policy": parts["policy"].engine}, 3)
    with refused("engines policy", "engines critic and policy", error=ConfigError):
        store.load(engines(parts), 3)
    with pytest.raises(CheckpointError, match=r"policy.*parameters.*delete"):
        store.load({"policy": parts["critic"].engine}, 3)
    (file,) = (tmp_path / "checkpoints/step_000003/policy").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"rank_0000_0000\.safetensors is broken.*delete.*step_000003"):
        store.load({"policy": parts["policy"].engine}, 3)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"parameters"):
        store.load({"policy": parts["policy"].engine}, 3)


def test_a_checkpoint_linked_elsewhere_outlives_the_original(tmp_path: Path) -> None:
    """A longer run takes the checkpoint of a shorter one over, whose own goes on writing."""
    short, parts = CheckpointStore(tmp_path / "short", keep=1), trained(0)
    short.save(engines(parts), 5, {"seen": [1]})
    expected = full_weights(parts)
    taken = tmp_path / "long" / "checkpoints" / "step_000005"
    shutil.copytree(tmp_path / "short" / "checkpoints" / "step_000005", taken, copy_function=link_or_copy)
    take_step(parts)
    short.save(engines(parts), 6, {"seen": [2]})
    long = CheckpointStore(tmp_path / "long", keep=1)
    assert long.newest() == 5
    assert long.load(engines(parts), 5) == {"seen": [1]}
    assert _equal(full_weights(parts), expected)


NUMEL = 24
CUTS = st.sets(st.integers(1, NUMEL - 1)).map(lambda inner: [0, *sorted(inner), NUMEL])


def _write_cut(folder: Path, cuts: list[int], ranks: int, file_bytes: int = 50) -> torch.Tensor:
    whole = torch.arange(float(NUMEL))
    pieces = [(PieceKey("weight", low, "a/b.c"), whole[low:high]) for low, high in pairwise(cuts)]
    for rank in range(ranks):
        write_pieces(folder, rank, {"a/b.c": (4, 6), "other": (1,)}, pieces[rank::ranks], file_bytes)
    return whole


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=CUTS, read=CUTS, ranks=st.integers(1, 3))
def test_any_cut_is_read_by_any_other(written: list[int], read: list[int], ranks: int, tmp_path: Path) -> None:
    for path in tmp_path.iterdir():
        path.unlink()
    whole = _write_cut(tmp_path, written, ranks)
    stored = PieceReader(tmp_path)
    assert stored.shapes == {"a/b.c": (4, 6)}
    for low, high in pairwise(read):
        into = torch.full((high - low,), torch.nan)
        stored.read(PieceKey("weight", low, "a/b.c"), into)
        assert torch.equal(into, whole[low:high])


def test_a_rank_writes_several_files_to_copy_little_at_a_time_and_elements_that_are_nowhere_are_missed(tmp_path):
    _write_cut(tmp_path, [0, 6, 12, 18, 24], ranks=1, file_bytes=40)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["rank_0000_0000.safetensors", "rank_0000_0001.safetensors"]
    for file in files:
        file.unlink()
    _write_cut(tmp_path, [0, 6, 24], ranks=2)
    (tmp_path / "rank_0001_0000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"4 of the 8 elements of weight of a/b\.c.*delete"):
        PieceReader(tmp_path).read(PieceKey("weight", 2, "a/b.c"), torch.empty(8))
    assert not PieceReader(tmp_path).has("step", "a/b.c")


SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"


def test_a_checkpoint_of_an_adapter_finds_its_base_in_a_workspace_that_was_moved(tmp_path: Path) -> None:
    base, stage = (tmp_path / "workspace" / "stages" / name for name in ("base/0123", "sft/4567"))
    base_model().save_pretrained(base / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    policy = adapted_policy(factors())
    CheckpointStore(stage, 2).save({"policy": policy.engine}, 1, is_extra=False)
    experiment = load_experiment(SMOKE, ["model.lora={rank: 3, alpha: 4.5}"])
    settings = next(node.settings for node in build_graph(experiment) if node.stage == "sft")
    job = StageJob(
        node="sft", stage="sft", key="4567", settings=settings, inputs={"model": str(base)}, upstream={"model": "0123"},
        execution=ExecutionConfig(), tracking=TrackingConfig(),
    )  # fmt: skip
    write_job(stage / JOB_FILE, job)
    moved = (tmp_path / "workspace").rename(tmp_path / "moved") / "stages" / "sft" / "4567"
    (checkpoint,) = (moved / "checkpoints").glob("step_*")
    export_checkpoint(checkpoint, moved, tmp_path / "tokenizer", "float32", tmp_path / "out")
    expected = dict(policy.weights())
    found = load_causal_lm(tmp_path / "out", "float32").state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
