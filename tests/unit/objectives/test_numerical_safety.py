"""No NaN and no infinity, in float32, values and gradients: for every loss and estimator that the config knows."""

import itertools
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from reference.token_cases import Row, Tokens, alone, demonstration, objective_of, packed, row_batch, term, tokens_of
from torch import Tensor

from luffy.config.group import AdvantageConfig, CustomAdvantage, GeneralizedAdvantage
from luffy.config.terms import (
    CustomLoss,
    ImportanceCorrection,
    LogShaping,
    LossConfig,
    ShapedSurrogateLoss,
    SurrogateLoss,
)
from luffy.objectives.advantages import RowRewards, generalized_advantages, group_advantages, whiten
from luffy.objectives.losses import TokenBatch, token_loss
from luffy.objectives.objective import objective_loss, token_weights
from luffy.training.ranks import init_process_group
from luffy.training.update_metrics import UpdateMetrics

NAN = float("nan")


def _variants(annotation: object) -> Iterator[object]:
    """Every value of a Literal; every configuration of a model, with its other fields at their defaults."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        options = {name: list(_variants(field.annotation)) for name, field in annotation.model_fields.items()}
        options = {name: values for name, values in options.items() if values}
        for values in itertools.product(*options.values()):
            yield annotation(**dict(zip(options, values, strict=True)))
    elif get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _variants(member)


SHIPPED = [model for model in get_args(get_args(LossConfig)[0]) if model is not CustomLoss]
LOSSES: list[LossConfig] = [loss for model in SHIPPED for loss in _variants(model)]
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.model_dump_json())


def test_every_kind_of_loss_is_among_the_cases() -> None:
    kinds = {model.model_fields["kind"].annotation.__args__[0] for model in SHIPPED}
    assert {loss.kind for loss in LOSSES} == kinds and len(kinds) >= 11
    assert {loss.shaping.kind for loss in LOSSES if loss.kind == "shaped_surrogate"} >= {"rational", "log", "power"}


# Probabilities: 1, next to 1, ordinary, 1e-9, the smallest normal float32 (1e-38), a subnormal one, none at all.
LOGPS = (0.0, -1e-7, -0.1, -1.0, -20.0, -87.5, -100.0, -1e4)


def _extreme_tokens(one_sequence: bool) -> TokenBatch:
    """Every combination of extremes: policy, old policy (and reference), sampler, advantage."""
    grid = np.array(list(itertools.product(LOGPS, LOGPS, (*LOGPS, NAN), (-2.6, 0.0, 2.6))))
    (logp_T, logp_old_T, logp_mu_T, advantage_T), numbers_T = grid.T, np.arange(len(grid))
    case = Tokens(logp_T, logp_old_T, logp_mu_T, logp_old_T[::-1], numbers_T % 3 * 6.0, advantage_T)
    tokens = packed([case], torch.float32)
    return replace(
        tokens,
        logp_BTC=torch.stack([tokens.logp_BT, tokens.logp_behavior_BT.nan_to_num(-80.0)], dim=-1),
        logq_BTC=torch.stack([tokens.logp_old_BT, tokens.logp_old_BT.flip(-1)], dim=-1),
        sequence_BT=tokens.sequence_BT if one_sequence else torch.from_numpy(numbers_T).unsqueeze(0),
    )


def _assert_finite(value: Tensor, *inputs: Tensor) -> None:
    assert torch.isfinite(value).all()
    if value.requires_grad:
        for gradient in torch.autograd.grad(value.sum(), inputs, allow_unused=True):
            assert gradient is None or torch.isfinite(gradient).all()


@EVERY_LOSS
def test_extreme_probabilities(loss: LossConfig) -> None:
    for one_sequence in (False, True):
        tokens = _extreme_tokens(one_sequence)
        _assert_finite(token_loss(loss, tokens).loss_BT, tokens.logp_BT, tokens.entropy_BT)


def _selectors(loss: LossConfig) -> list[str]:
    """Where the loss may be used."""
    found = []
    for select in ("on_policy", "off_policy", "response"):
        try:
            term(loss, select)
        except ValueError:
            continue
        found.append(select)
    assert found
    return found


CLAMPED = [
    ShapedSurrogateLoss(kind="shaped_surrogate", shaping=LogShaping(kind="log"), **{clamp: -2.0})
    for clamp in ("min_weight", "max_weight")
]


@pytest.mark.parametrize("loss", [*LOSSES, *CLAMPED], ids=lambda loss: loss.model_dump_json())
def test_a_loss_with_bounds_reports_the_extremes_that_it_clips(loss: LossConfig) -> None:
    init_process_group()
    tokens, config = _extreme_tokens(one_sequence=False), term(loss, _selectors(loss)[0])
    weight_KBT, metrics = torch.ones(1, *tokens.logp_BT.shape, dtype=torch.float64), UpdateMetrics((config,))
    output = objective_loss((config,), tokens, weight_KBT)
    metrics.add(row_batch([Row(tokens.logp_BT.shape[1] - 1)]), tokens, weight_KBT, output)
    clipped = metrics.summary().get("actor/tested_clip_fraction", 0.0)
    has_bounds = any(name.startswith(("clip_", "max_", "min_")) for name in loss.model_dump(exclude_none=True))
    assert 0 < clipped < 1 if has_bounds else clipped == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
@pytest.mark.parametrize("one_sequence", [False, True])
def test_extreme_probabilities_under_correction_and_mask(level: str, kind: str, one_sequence: bool) -> None:
    correction = ImportanceCorrection(level=level, kind=kind)
    config = term(SurrogateLoss(kind="surrogate"), correction=correction, top_entropy_share=0.2)
    tokens = _extreme_tokens(one_sequence)
    _assert_finite(objective_loss((config,), tokens, torch.ones(1, *tokens.logp_BT.shape)).loss, tokens.logp_BT)


@EVERY_LOSS
def test_trace_that_the_model_finds_impossible(loss: LossConfig) -> None:
    """All the way to the logits, which put everything on another token."""
    logits_BTV = torch.zeros(1, 4, 5)
    logits_BTV[..., 3] = torch.tensor([88.0, 1e3, 1e4, 1e30])
    logits_BTV.requires_grad_()
    logp_BTV = logits_BTV.log_softmax(-1)
    batch = row_batch([demonstration(3)])
    tokens = tokens_of(batch, logp_BTV[..., 0], -(logp_BTV.exp() * logp_BTV).sum(-1))
    _assert_finite(token_loss(loss, tokens).loss_BT, logits_BTV)


ROWS = (
    [Row(3), demonstration(2), Row(1)],
    [Row(0), Row(2), demonstration(0)],
    [Row(0), demonstration(0)],
    [Row(2), Row(1)],
    [demonstration(2)],
    [Row(4, guided=2), Row(4, guided=4), Row(1)],
)


@EVERY_LOSS
def test_rows_without_tokens(loss: LossConfig) -> None:
    for select, mode, rows in itertools.product(_selectors(loss), ("token", "sequence", "constant"), ROWS):
        batch = row_batch(rows)
        config = term(loss, select, mode=mode)
        weight_KBT = token_weights(objective_of(config), batch, alone)
        logp_BT = torch.full(batch.input_ids_BT.shape, -0.5, requires_grad=True)
        assert torch.isfinite(weight_KBT).all(), (select, mode, rows)
        _assert_finite(objective_loss((config,), tokens_of(batch, logp_BT), weight_KBT).loss, logp_BT)


@EVERY_LOSS
def test_rubbish_at_unselected_tokens_does_not_reach_loss_or_gradient(loss: LossConfig) -> None:
    """A fully masked row, and the prompts: NaN and infinities everywhere."""
    for select in _selectors(loss):
        config, batch = term(loss, select), row_batch([Row(3), demonstration(3), Row(3)])
        batch.response_mask_BT[2] = False
        rubbish_BT = ~batch.response_mask_BT
        logp_BT = torch.full(rubbish_BT.shape, -0.5).masked_fill(rubbish_BT, 1e4).requires_grad_()
        entropy_BT = torch.ones(rubbish_BT.shape).masked_fill(rubbish_BT, float("inf"))
        for name in ("logp_old_BT", "logp_behavior_BT", "logp_ref_BT", "advantage_BT"):
            getattr(batch, name).masked_fill_(rubbish_BT, NAN if name != "logp_ref_BT" else -float("inf"))
        weight_KBT = token_weights(objective_of(config), batch, alone)
        value = objective_loss((config,), tokens_of(batch, logp_BT, entropy_BT), weight_KBT).loss
        _assert_finite(value, logp_BT)


# ---- advantages ----


def _estimators() -> Iterator[AdvantageConfig]:
    settings = {"scale_by_std": True, "k": 2}
    shipped = [model for model in get_args(get_args(AdvantageConfig)[0]) if model is not CustomAdvantage]
    for model, population in itertools.product(shipped, ("joint", "on_policy")):
        known = {**settings, "population": population}
        if model is not GeneralizedAdvantage and (population == "joint" or "population" in model.model_fields):
            (kind,) = get_args(model.model_fields["kind"].annotation)
            yield model(kind=kind, **{name: value for name, value in known.items() if name in model.model_fields})


ESTIMATORS = list(_estimators())
EVERY_ESTIMATOR = pytest.mark.parametrize(
    "config", ESTIMATORS, ids=lambda c: f"{c.kind}-{getattr(c, 'population', '')}"
)
CASES: dict[str, tuple[list[float], list[int], list[int], list[bool]]] = {
    "no_row": ([], [], [], []),
    "one_row": ([1.0], [3], [0], [False]),
    "empty_group": ([1.0, 0.0, 0.0], [3, 2, 2], [0, 0, 2], [False, False, False]),
    "only_demonstrations": ([1.0, 1.0], [3, 2], [0, 0], [True, True]),
    "all_equal": ([0.1] * 5, [3, 2, 4, 1, 1], [0, 0, 0, 1, 1], [False, True, False, False, True]),
    "no_tokens": ([1.0, 0.0, 1.0], [0, 0, 0], [0, 0, 1], [False, False, False]),
    "one_without_tokens": ([1.0, 0.0], [0, 4], [0, 0], [False, True]),
    "tiny_difference": ([1.0, 1.0 - 1e-7], [3, 3], [0, 0], [False, False]),
    "huge": ([1e30, -1e30, 0.0], [3, 3, 3], [0, 0, 0], [False, False, False]),
}


@EVERY_ESTIMATOR
def test_estimators(config: AdvantageConfig) -> None:
    for case, (reward, length, group, off) in CASES.items():
        rows = RowRewards(
            reward_B=torch.tensor(reward),
            length_B=torch.tensor(length, dtype=torch.long),
            group_B=torch.tensor(group, dtype=torch.long),
            is_off_policy_B=torch.tensor(off, dtype=torch.bool),
        )
        found = group_advantages(rows, config)
        assert found.shape == (len(reward),) and torch.isfinite(found).all(), case


@pytest.mark.parametrize("without", [(0, 0), (0, slice(None)), (slice(None), 0), (0, 2)], ids=str)
@pytest.mark.parametrize("value", [0.5, 1e30])
def test_gae_and_whitening(without: tuple[int | slice, int | slice], value: float) -> None:
    """Without some of the tokens, or a whole row, or with one left in each."""
    mask_BT = torch.tensor([[False, True, True], [False, True, False]])
    mask_BT[without] = False
    config, value_BT = GeneralizedAdvantage(kind="gae"), torch.full((2, 3), value)
    advantage_BT, return_BT = generalized_advantages(torch.tensor([1.0, 0.0]), value_BT, mask_BT, config)
    assert torch.isfinite(advantage_BT).all() and torch.isfinite(return_BT).all()
    assert torch.isfinite(whiten(advantage_BT, mask_BT, alone)).all()
