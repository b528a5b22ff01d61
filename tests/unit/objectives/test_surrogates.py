"""Policy-gradient losses against the papers' formulas: values, gradients, and numbers worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import formulas
from reference.token_cases import Tokens, assert_same, evaluate, sequences, tokens

from luffy.config.terms import (
    AipoLoss,
    CispoLoss,
    ClippedSurrogateLoss,
    IdentityShaping,
    LinearLogShaping,
    LogShaping,
    MultipleImportanceLoss,
    PowerShaping,
    RationalShaping,
    SequenceSurrogateLoss,
    ShapedSurrogateLoss,
    ShapingConfig,
    SurrogateLoss,
    TotalVariationMaskedLoss,
)

CLIPS = [(0.2, 0.2), (0.2, 0.28), (0.5, 2.0)]
SHAPINGS: list[tuple[ShapingConfig, formulas.Shaping]] = [
    (RationalShaping(kind="rational", gamma=0.1), formulas.rational_shaping(0.1)),
    (RationalShaping(kind="rational", gamma=0.5), formulas.rational_shaping(0.5)),
    (IdentityShaping(kind="identity"), formulas.identity_shaping()),
    (LogShaping(kind="log"), formulas.log_shaping()),
    (PowerShaping(kind="power", exponent=0.5), formulas.power_shaping(0.5)),
    (PowerShaping(kind="power", exponent=1.3), formulas.power_shaping(1.3)),
    (LinearLogShaping(kind="linear_log", weight=0.1), formulas.linear_log_shaping(0.1)),
]
LOG = math.log


def _away_from(ratio: np.ndarray, *kinks: float) -> None:
    """The formulas have no gradient at their kinks."""
    assume(all(np.min(np.abs(ratio - kink)) > 1e-9 for kink in kinks))


# ---- surrogate ----


@given(sequences())
def test_surrogate(case: Tokens) -> None:
    found = evaluate(SurrogateLoss(kind="surrogate"), case)
    assert_same(found, formulas.surrogate(case.logp_T, case.logp_old_T, case.advantage_T))


def test_surrogate_by_hand() -> None:
    case = tokens([LOG(0.3), LOG(0.1)], old=[LOG(0.2), LOG(0.4)], advantage=[2.0, -1.0])
    loss, gradient = evaluate(SurrogateLoss(kind="surrogate"), case)
    assert loss.tolist() == pytest.approx([-3.0, 0.25])
    assert gradient.tolist() == pytest.approx([-3.0, 0.25])


# ---- clipped surrogate ----


@pytest.mark.parametrize(("low", "high"), CLIPS)
@given(case=sequences())
def test_clipped_surrogate(low: float, high: float, case: Tokens) -> None:
    _away_from(np.exp(case.logp_T - case.logp_old_T), 1 - low, 1 + high)
    found = evaluate(ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=low, clip_high=high), case)
    assert_same(found, formulas.clipped(case.logp_T, case.logp_old_T, case.advantage_T, low, high))


@given(sequences())
def test_dual_clip(case: Tokens) -> None:
    _away_from(np.exp(case.logp_T - case.logp_old_T), 0.8, 1.28, 3.0)
    found = evaluate(ClippedSurrogateLoss(kind="clipped_surrogate", clip_high=0.28, dual_clip=3.0), case)
    assert_same(found, formulas.dual_clipped(case.logp_T, case.logp_old_T, case.advantage_T, 0.2, 0.28, 3.0))


@pytest.mark.parametrize(("ratio", "advantage", "expected", "gradient"), [
    (1.25, 1.0, -1.25, -1.25),  # within clip-higher, where 0.2 on both sides would clip
    (1.5, 1.0, -1.28, 0.0),  # moved up enough
    (1.5, -1.0, 1.5, 1.5),  # moved up against the advantage: the bare ratio pulls back
    (0.5, -1.0, 0.8, 0.0),  # moved down enough
    (0.5, 1.0, -0.5, -0.5),
    (5.0, -1.0, 3.0, 0.0),  # beyond the dual clip
    (5.0, 1.0, -1.28, 0.0),  # the dual clip is for negative advantages alone
])  # fmt: skip
def test_clips_by_hand(ratio: float, advantage: float, expected: float, gradient: float) -> None:
    config = ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    case = tokens([LOG(0.1 * ratio)], old=[LOG(0.1)], advantage=advantage)
    assert_same(evaluate(config, case), (np.array([expected]), np.array([gradient])))


# ---- sequence surrogate ----


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28)])
@given(case=sequences(one_advantage=True))
def test_sequence_surrogate(low: float, high: float, case: Tokens) -> None:
    ratio = np.exp(np.mean(case.logp_T - case.logp_old_T))
    _away_from(np.array([ratio]), 1 - low, 1 + high)
    found = evaluate(SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=low, clip_high=high), case)
    expected = formulas.sequence_clipped(case.logp_T, case.logp_old_T, case.advantage_T[0], low, high)
    assert_same(found, expected)


@given(st.lists(sequences(one_advantage=True), min_size=2, max_size=4))
def test_sequences_of_a_packed_row_have_ratios_of_their_own(cases: list[Tokens]) -> None:
    for case in cases:
        _away_from(np.array([np.exp(np.mean(case.logp_T - case.logp_old_T))]), 0.8, 1.28)
    config = SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=0.2, clip_high=0.28)
    alone = [formulas.sequence_clipped(c.logp_T, c.logp_old_T, c.advantage_T[0], 0.2, 0.28) for c in cases]
    expected = tuple(np.concatenate(column) for column in zip(*alone, strict=True))
    assert_same(evaluate(config, *cases), expected)


def test_sequence_ratio_is_the_geometric_mean_of_token_ratios() -> None:
    case = tokens([LOG(0.8), LOG(0.1)], old=[LOG(0.4), LOG(0.05 / 0.5625)], advantage=1.0)  # ratios 2 and 9/8
    config = SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=0.9, clip_high=9.0)
    loss, gradient = evaluate(config, case)
    assert loss.tolist() == pytest.approx([-1.5, -1.5])
    assert gradient.tolist() == pytest.approx([-1.5, -1.5])


# ---- weights without gradient ----


@pytest.mark.parametrize("low", [None, 0.2])
@pytest.mark.parametrize("high", [0.28, 4.0])
@given(case=sequences())
def test_cispo(low: float | None, high: float, case: Tokens) -> None:
    found = evaluate(CispoLoss(kind="cispo", clip_low=low, clip_high=high), case)
    assert_same(found, formulas.cispo(case.logp_T, case.logp_old_T, case.advantage_T, low, high))


def test_cispo_drops_no_token() -> None:
    case = tokens([LOG(0.9)], old=[LOG(0.01)], advantage=1.0)  # ratio 90
    _, gradient = evaluate(CispoLoss(kind="cispo", clip_high=4.0), case)
    assert gradient.tolist() == pytest.approx([-5.0])


@given(sequences())
def test_aipo(case: Tokens) -> None:
    found = evaluate(AipoLoss(kind="aipo", max_ratio=4.0), case)
    assert_same(found, formulas.aipo(case.logp_T, case.logp_mu_T, case.advantage_T, 4.0))


def test_aipo_truncates_from_above_only() -> None:
    case = tokens([LOG(0.5), LOG(0.1)], mu=[LOG(0.05), LOG(0.5)], old=[0.0, 0.0], advantage=1.0)  # 10 and 0.2
    loss, gradient = evaluate(AipoLoss(kind="aipo", max_ratio=4.0), case)
    assert gradient.tolist() == pytest.approx([-4.0, -0.2])
    assert loss.tolist() == pytest.approx([-4.0 * LOG(0.5), -0.2 * LOG(0.1)])


@given(sequences())
def test_tv_masked(case: Tokens) -> None:
    _away_from(np.exp(case.logp_T) - np.exp(case.logp_mu_T), 0.2, -0.1)
    config = TotalVariationMaskedLoss(kind="tv_masked_surrogate", max_increase=0.2, max_decrease=0.1)
    assert_same(evaluate(config, case), formulas.tv_masked(case.logp_T, case.logp_mu_T, case.advantage_T, 0.2, 0.1))


@pytest.mark.parametrize(("p", "mu", "advantage", "expected"), [
    (0.5, 0.2, 1.0, 0.0),  # risen by 0.3 with a positive advantage
    (0.5, 0.2, -1.0, 2.5),  # risen against the advantage: kept
    (0.2, 0.5, -1.0, 0.0),
    (0.2, 0.5, 1.0, -0.4),
    (0.19, 0.001, 1.0, -190.0),  # a rare token may move by a large ratio
])  # fmt: skip
def test_tv_mask_by_hand(p: float, mu: float, advantage: float, expected: float) -> None:
    config = TotalVariationMaskedLoss(kind="tv_masked_surrogate")
    found = evaluate(config, tokens([LOG(p)], mu=[LOG(mu)], old=[0.0], advantage=advantage))
    assert_same(found, (np.array([expected]), np.array([expected])))


@pytest.mark.parametrize(
    "config", [AipoLoss(kind="aipo"), TotalVariationMaskedLoss(kind="tv_masked_surrogate")], ids=lambda c: c.kind
)
@given(case=sequences(unknown=True))
def test_unknown_sampler_is_the_policy_before_the_update(config: AipoLoss, case: Tokens) -> None:
    filled = np.where(np.isnan(case.logp_mu_T), case.logp_old_T, case.logp_mu_T)
    known = Tokens(**{**case.__dict__, "logp_mu_T": filled})
    assert_same(evaluate(config, case), evaluate(config, known))


# ---- off-policy surrogates ----


@pytest.mark.parametrize(("config", "shaping"), SHAPINGS, ids=lambda s: getattr(s, "kind", ""))
@given(
    case=sequences(unknown=True),
    behavior=st.sampled_from(["recorded", "one"]),
    low=st.sampled_from([None, 0.0123]),
    high=st.sampled_from([None, 0.6789]),
)
def test_shaped_surrogate(config, shaping, behavior, low, high, case):
    loss = ShapedSurrogateLoss(
        kind="shaped_surrogate", shaping=config, behavior=behavior, min_weight=low, max_weight=high
    )
    author_T = case.logp_mu_T if behavior == "recorded" else np.full(len(case), np.nan)
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    assert_same(evaluate(loss, case), formulas.shaped(case.logp_T, author_T, case.advantage_T, shaping, *bounds))


@given(sequences())
def test_behavior_one_is_the_recorded_loss_of_an_unknown_author(case: Tokens) -> None:
    shaping = RationalShaping(kind="rational")
    ones = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, behavior="one")
    recorded = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, behavior="recorded")
    unknown = Tokens(**{**case.__dict__, "logp_mu_T": np.full(len(case), np.nan)})
    assert_same(evaluate(ones, case), evaluate(recorded, unknown))


def test_shaped_surrogate_by_hand() -> None:
    shaping = RationalShaping(kind="rational", gamma=0.1)
    loss = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, behavior="recorded")
    case = tokens([LOG(0.1), LOG(0.1)], mu=[math.nan, LOG(0.25)], advantage=0.875)  # rho 0.1 and 0.4
    found = evaluate(loss, case)
    assert_same(found, (np.array([-0.4375, -0.7]), np.array([-0.875 * 0.25, -0.875 * 0.16])))


def test_a_clamped_weight_has_no_gradient() -> None:
    identity = IdentityShaping(kind="identity")
    loss = ShapedSurrogateLoss(kind="shaped_surrogate", shaping=identity, behavior="recorded", max_weight=2.0)
    case = tokens([LOG(0.6), LOG(0.6)], mu=[LOG(0.2), LOG(0.5)], advantage=1.0)
    assert_same(evaluate(loss, case), (np.array([-2.0, -1.2]), np.array([0.0, -1.2])))


@pytest.mark.parametrize("exponent", [0.0, 0.5, 2.0])
@given(case=sequences())
def test_multiple_importance(exponent: float, case: Tokens) -> None:
    config = MultipleImportanceLoss(kind="multiple_importance", exploration_exponent=exponent)
    expected = formulas.multiple_importance(case.logp_T, case.logp_old_T, case.advantage_T, exponent)
    # 1 - p next to p = 1 keeps half of the digits under the root.
    assert_same(evaluate(config, case), expected, atol=1e-7)


def test_multiple_importance_by_hand() -> None:
    case = tokens([LOG(0.19)], old=[LOG(0.2)], advantage=1.0)  # 0.9 x 0.38 / (0.2 + 0.6)
    loss, gradient = evaluate(MultipleImportanceLoss(kind="multiple_importance"), case)
    assert loss.tolist() == pytest.approx([-0.4275])
    assert gradient.tolist() == pytest.approx([-0.4275])
