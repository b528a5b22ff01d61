"""Checkpoints: complete or not there, newest kept, and a resumed policy is the same policy."""

import copy
from pathlib import Path

import pytest
import torch
from reference.gradient_case import MAX_RESPONSE_TOKENS, execution, make_batch, terms_of, tiny_model

from luffy.config.training import OptimizerConfig
from luffy.errors import CheckpointError
from luffy.training.checkpoint import CheckpointStore
from luffy.training.policy import Policy

OPTIMIZER = OptimizerConfig(lr=1e-2)


def _policy(seed: int = 0) -> Policy:
    return Policy(tiny_model(seed), OPTIMIZER, execution(), "float32")


def _step(policy: Policy) -> None:
    policy.update(make_batch("luffy", copy.deepcopy(policy.causal_lm)), terms_of("luffy"), MAX_RESPONSE_TOKENS, 1e-2)


def test_resumed_policy_continues_bit_for_bit(tmp_path: Path) -> None:
    store, undisturbed = CheckpointStore(tmp_path / "checkpoints", keep=2), _policy()
    _step(undisturbed)
    store.save(undisturbed.engine, 1, {"note": "kept"})
    _step(undisturbed)
    resumed = _policy(seed=9)
    assert store.load(resumed.engine, 1) == {"note": "kept"}
    _step(resumed)
    for name, parameter in undisturbed.causal_lm.named_parameters():
        assert torch.equal(parameter, dict(resumed.causal_lm.named_parameters())[name]), name


def test_only_the_newest_stay_and_an_incomplete_one_never_counts(tmp_path: Path) -> None:
    store, policy = CheckpointStore(tmp_path, keep=2), _policy()
    assert store.newest() is None
    for step in (10, 20, 30):
        store.save(policy.engine, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000020", "step_000030"]
    (tmp_path / "step_000030" / "COMPLETE").unlink()
    assert store.newest() == 20
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        store.load(policy.engine, 30)
