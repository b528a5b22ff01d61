"""Checkpoints: complete or not there, newest kept, and a resumed policy is the same policy."""

import copy
from pathlib import Path

import pytest
import torch
from reference.gradient_case import MAX_RESPONSE_TOKENS, execution, make_batch, terms_of, tiny_model

from luffy.config.training import OptimizerConfig
from luffy.errors import CheckpointError, ConfigError
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy

OPTIMIZER = OptimizerConfig(lr=1e-2)


def _policy(seed: int = 0, zero_stage: int = 0) -> Policy:
    return Policy(tiny_model(seed), OPTIMIZER, execution(zero_stage=zero_stage), "float32")


def _step(policy: Policy) -> None:
    policy.update(make_batch("luffy", copy.deepcopy(policy.causal_lm)), terms_of("luffy"), MAX_RESPONSE_TOKENS, 1e-2)


def test_resumed_policy_continues_bit_for_bit(tmp_path: Path) -> None:
    store, undisturbed = CheckpointStore(tmp_path, keep=2), _policy()
    _step(undisturbed)
    store.save(undisturbed.engine, 1)
    _step(undisturbed)
    resumed = _policy(seed=9)
    store.load(resumed.engine, 1)
    _step(resumed)
    for name, parameter in undisturbed.causal_lm.named_parameters():
        assert torch.equal(parameter, dict(resumed.causal_lm.named_parameters())[name]), name


def test_only_the_newest_stay_and_an_incomplete_one_never_counts(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=2), _policy()
    assert store.newest() is None
    for step in (10, 20, 30):
        store.save(policy.engine, step)
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_000020", "step_000030"]
    (folder / "step_000030" / "COMPLETE").unlink()
    assert store.newest() == 20
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        store.load(policy.engine, 30)


def test_another_zero_stage_is_refused_in_one_line(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(_policy().engine, 3)
    with pytest.raises(ConfigError, match="zero_stage 0, ranks 1, this run has zero_stage 2"):
        store.load(_policy(zero_stage=2).engine, 3)
