"""Policy-gradient losses, importance correction and the top-entropy mask: papers' formulas and numbers by hand."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import formulas
from reference.token_cases import Tokens, assert_same, evaluate, evaluate_term, packed, sequences, term, tokens

from luffy.config.terms import (
    AipoLoss,
    CispoLoss,
    ClippedSurrogateLoss,
    IdentityShaping,
    ImportanceCorrection,
    LinearLogShaping,
    LogShaping,
    MultipleImportanceLoss,
    NegativeLogLikelihoodLoss,
    PowerShaping,
    RationalShaping,
    SequenceSurrogateLoss,
    ShapedSurrogateLoss,
    ShapingConfig,
    SurrogateLoss,
    TotalVariationMaskedLoss,
)
from luffy.objectives.objective import objective_loss

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
RATIONAL = RationalShaping(kind="rational", gamma=0.1)
SURROGATE = SurrogateLoss(kind="surrogate")
DUAL = ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=0.2, clip_high=0.28, dual_clip=3.0)
AIPO = AipoLoss(kind="aipo", max_ratio=4.0)
MASKED = TotalVariationMaskedLoss(kind="tv_masked_surrogate", max_increase=0.2, max_decrease=0.1)
LOG = math.log


def shaped(shaping: ShapingConfig = RATIONAL, **settings: object) -> ShapedSurrogateLoss:
    return ShapedSurrogateLoss(kind="shaped_surrogate", shaping=shaping, **{"behavior": "recorded", **settings})


def clipped(low: float, high: float) -> ClippedSurrogateLoss:
    return ClippedSurrogateLoss(kind="clipped_surrogate", clip_low=low, clip_high=high)


def cispo(low: float | None, high: float) -> CispoLoss:
    return CispoLoss(kind="cispo", clip_low=low, clip_high=high)


def mis(exponent: float) -> MultipleImportanceLoss:
    return MultipleImportanceLoss(kind="multiple_importance", exploration_exponent=exponent)


def to_old(case: Tokens) -> tuple[np.ndarray, ...]:
    return case.logp_T, case.logp_old_T, case.advantage_T


def to_sampler(case: Tokens) -> tuple[np.ndarray, ...]:
    return case.logp_T, case.logp_mu_T, case.advantage_T


def ratio(case: Tokens) -> np.ndarray:
    return np.exp(case.logp_T - case.logp_old_T)


def gap(case: Tokens) -> np.ndarray:
    return np.exp(case.logp_T) - np.exp(case.logp_mu_T)


def _away_from(values: np.ndarray, *kinks: float) -> None:
    """The formulas have no gradient at their kinks."""
    assume(all(np.min(np.abs(values - kink)) > 1e-9 for kink in kinks))


@pytest.mark.parametrize(
    ("config", "formula", "arguments", "kinked", "kinks"),
    [
        (SURROGATE, formulas.surrogate, (to_old,), ratio, ()),
        *((clipped(*clip), formulas.clipped, (to_old, *clip), ratio, (1 - clip[0], 1 + clip[1])) for clip in CLIPS),
        (DUAL, formulas.dual_clipped, (to_old, 0.2, 0.28, 3.0), ratio, (0.8, 1.28, 3.0)),
        *((cispo(*clip), formulas.cispo, (to_old, *clip), ratio, ()) for clip in product((None, 0.2), (0.28, 4.0))),
        (AIPO, formulas.aipo, (to_sampler, 4.0), ratio, ()),
        (MASKED, formulas.tv_masked, (to_sampler, 0.2, 0.1), gap, (0.2, -0.1)),
        *((mis(exponent), formulas.multiple_importance, (to_old, exponent), ratio, ()) for exponent in (0.0, 0.5, 2.0)),
    ],
    ids=lambda value: value.model_dump_json() if hasattr(value, "kind") else "",
)
@given(case=sequences())
def test_a_loss_and_its_gradient_are_their_formula(config, formula, arguments, kinked, kinks, case):
    _away_from(kinked(case), *kinks)
    policies, *settings = arguments
    # Multiple importance: 1 - p next to p = 1 keeps half of the digits under the root.
    atol = 1e-7 if isinstance(config, MultipleImportanceLoss) else 1e-12
    assert_same(evaluate(config, case), formula(*policies(case), *settings), atol=atol)


@pytest.mark.parametrize(
    ("config", "case", "loss", "gradient"),
    [
        (
            SURROGATE,
            tokens([LOG(0.3), LOG(0.1)], old=[LOG(0.2), LOG(0.4)], advantage=[2.0, -1.0]),
            [-3.0, 0.25],
            [-3.0, 0.25],
        ),
        # Ratios 2 and 9/8: their geometric mean is 1.5.
        (
            SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=0.9, clip_high=9.0),
            tokens([LOG(0.8), LOG(0.1)], old=[LOG(0.4), LOG(0.05 / 0.5625)]),
            [-1.5, -1.5],
            [-1.5, -1.5],
        ),
        # A ratio of 90: no token is dropped.
        (cispo(None, 4.0), tokens([LOG(0.9)], old=[LOG(0.01)]), [-5.0 * LOG(0.9)], [-5.0]),
        # Ratios 10 and 0.2 to the sampler: truncated from above only.
        (
            AIPO,
            tokens([LOG(0.5), LOG(0.1)], mu=[LOG(0.05), LOG(0.5)], old=[0.0, 0.0]),
            [-4.0 * LOG(0.5), -0.2 * LOG(0.1)],
            [-4.0, -0.2],
        ),
        # rho 0.1 and 0.4.
        (
            shaped(),
            tokens([LOG(0.1), LOG(0.1)], mu=[math.nan, LOG(0.25)], advantage=0.875),
            [-0.4375, -0.7],
            [-0.875 * 0.25, -0.875 * 0.16],
        ),
        # A clamped weight has no gradient.
        (
            shaped(IdentityShaping(kind="identity"), max_weight=2.0),
            tokens([LOG(0.6), LOG(0.6)], mu=[LOG(0.2), LOG(0.5)]),
            [-2.0, -1.2],
            [0.0, -1.2],
        ),
        # 0.9 x 0.38 / (0.2 + 0.6)
        (MultipleImportanceLoss(kind="multiple_importance"), tokens([LOG(0.19)], old=[LOG(0.2)]), [-0.4275], [-0.4275]),
    ],
    ids=["surrogate", "sequence", "cispo", "aipo", "shaped", "clamped", "multiple_importance"],
)
def test_losses_by_hand(config, case, loss, gradient):
    assert_same(evaluate(config, case), (np.array(loss), np.array(gradient)))


# p -> p * f'(p) for f(x) = x / (x + 0.1), rounded as published (LUFFY, arXiv 2504.14945, eq. 6-7).
PUBLISHED = {0.001: 0.0098, 0.01: 0.0826, 0.05: 0.2222, 0.1: 0.25, 0.5: 0.1389, 0.99: 0.0833}


@pytest.mark.parametrize(("p", "expected"), PUBLISHED.items())
def test_the_gradient_of_policy_shaping_is_the_published_table(p: float, expected: float) -> None:
    _, gradient = evaluate(shaped(), tokens([LOG(p)], mu=[math.nan]))
    assert -gradient[0] == pytest.approx(expected, abs=6e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient"),
    [
        (1.25, 1.0, -1.25, -1.25),  # within clip-higher, where 0.2 on both sides would clip
        (1.5, 1.0, -1.28, 0.0),  # moved up enough
        (1.5, -1.0, 1.5, 1.5),  # moved up against the advantage: the bare ratio pulls back
        (0.5, -1.0, 0.8, 0.0),  # moved down enough
        (0.5, 1.0, -0.5, -0.5),
        (5.0, -1.0, 3.0, 0.0),  # beyond the dual clip
        (5.0, 1.0, -1.28, 0.0),  # the dual clip is for negative advantages alone
    ],
)
def test_clips_by_hand(ratio: float, advantage: float, expected: float, gradient: float) -> None:
    case = tokens([LOG(0.1 * ratio)], old=[LOG(0.1)], advantage=advantage)
    assert_same(evaluate(DUAL, case), (np.array([expected]), np.array([gradient])))
    batch = packed([case])
    limited_KBT = objective_loss((term(DUAL),), batch, torch.ones(1, 1, 1)).limited_KBT
    assert limited_KBT.item() == (gradient == 0), "metrics count it as clipped"


@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.2, 0.28)])
@given(cases=st.lists(sequences(one_advantage=True), min_size=1, max_size=4))
def test_sequences_of_a_packed_row_have_ratios_of_their_own(low: float, high: float, cases: list[Tokens]) -> None:
    for case in cases:
        _away_from(np.array([np.exp(np.mean(case.logp_T - case.logp_old_T))]), 1 - low, 1 + high)
    config = SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=low, clip_high=high)
    alone = [formulas.sequence_clipped(c.logp_T, c.logp_old_T, c.advantage_T[0], low, high) for c in cases]
    expected = tuple(np.concatenate(column) for column in zip(*alone, strict=True))
    assert_same(evaluate(config, *cases), expected)


@pytest.mark.parametrize(
    "config", [AipoLoss(kind="aipo"), TotalVariationMaskedLoss(kind="tv_masked_surrogate")], ids=lambda c: c.kind
)
@given(case=sequences(unknown=True))
def test_unknown_sampler_is_the_policy_before_the_update(config: AipoLoss, case: Tokens) -> None:
    filled = np.where(np.isnan(case.logp_mu_T), case.logp_old_T, case.logp_mu_T)
    known = Tokens(**{**case.__dict__, "logp_mu_T": filled})
    assert_same(evaluate(config, case), evaluate(config, known))


@pytest.mark.parametrize(("config", "shaping"), SHAPINGS, ids=lambda s: getattr(s, "kind", ""))
@given(
    case=sequences(unknown=True),
    behavior=st.sampled_from(["recorded", "one"]),
    low=st.sampled_from([None, 0.0123]),
    high=st.sampled_from([None, 0.6789]),
)
def test_shaped_surrogate(config, shaping, behavior, low, high, case):
    loss = shaped(config, behavior=behavior, min_weight=low, max_weight=high)
    author_T = case.logp_mu_T if behavior == "recorded" else np.full(len(case), np.nan)
    bounds = (-math.inf if low is None else low, math.inf if high is None else high)
    assert_same(evaluate(loss, case), formulas.shaped(case.logp_T, author_T, case.advantage_T, shaping, *bounds))


NLL = NegativeLogLikelihoodLoss(kind="nll")
NAN = math.nan


def _corrected(case: Tokens, level: str, kind: str, low: float, high: float) -> formulas.Loss:
    loss_T, gradient_T = formulas.surrogate(case.logp_T, case.logp_old_T, case.advantage_T)
    weight_T = formulas.importance_weight(case.logp_old_T, case.logp_mu_T, level, kind, low, high)
    return loss_T * weight_T, gradient_T * weight_T


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "low", "high"), [("truncate", 0.0, 2.0), ("mask", 0.5, 5.0)])
@given(cases=st.lists(sequences(unknown=True), min_size=1, max_size=3))
def test_importance_correction(level: str, kind: str, low: float, high: float, cases: list[Tokens]) -> None:
    for case in cases:
        weight_T = formulas.importance_weight(case.logp_old_T, case.logp_mu_T, level, "truncate", 0.0, np.inf)
        assume(all(np.min(np.abs(weight_T - bound)) > 1e-9 for bound in (low, high)))
    correction = ImportanceCorrection(level=level, kind=kind, low=low, high=high)
    value, gradient = evaluate_term(term(SURROGATE, correction=correction), *cases)
    expected = [_corrected(case, level, kind, low, high) for case in cases]
    assert value == pytest.approx(sum(loss_T.sum() for loss_T, _ in expected), rel=1e-9, abs=1e-9)
    np.testing.assert_allclose(gradient, np.concatenate([g for _, g in expected]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("level", "kind", "low", "high", "expected"),
    [
        ("token", "truncate", 0.0, 2.0, [2.0, 0.5, 1.0]),
        ("token", "mask", 0.4, 2.0, [0.0, 0.5, 1.0]),
        ("token", "mask", 0.6, 5.0, [4.0, 0.0, 1.0]),
        ("sequence", "truncate", 0.0, 3.0, [2.0, 2.0, 2.0]),  # 4 x 0.5 x 1
        ("sequence", "truncate", 0.0, 1.5, [1.5, 1.5, 1.5]),
        ("sequence", "mask", 0.0, 1.5, [0.0, 0.0, 0.0]),
    ],
)
def test_correction_by_hand(level: str, kind: str, low: float, high: float, expected: list[float]) -> None:
    old = [LOG(0.4), LOG(0.2), LOG(0.3)]
    case = tokens(old, mu=[LOG(0.1), LOG(0.4), NAN], advantage=1.0)  # w = 4, 0.5, unknown
    correction = ImportanceCorrection(level=level, kind=kind, low=low, high=high)
    _, gradient = evaluate_term(term(SURROGATE, correction=correction), case)
    assert gradient.tolist() == pytest.approx([-w for w in expected])


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@given(cases=st.lists(sequences(), min_size=1, max_size=3))
def test_top_entropy_mask_works_on_each_sequence(share: float, cases: list[Tokens]) -> None:
    for case in cases:
        assume(len(set(case.entropy_T)) == len(case))
    _, gradient = evaluate_term(term(NLL, "off_policy", top_entropy_share=share), *cases)
    counts = [-(-len(case) * round(share * 10) // 10) for case in cases]  # rounded up, in whole tenths
    expected = [formulas.highest_entropy(case.entropy_T, n) for case, n in zip(cases, counts, strict=True)]
    assert gradient.tolist() == (-np.concatenate(expected)).tolist()


@pytest.mark.parametrize(("share", "length", "kept"), [(0.5, 4, 2), (0.55, 100, 55)])
def test_tokens_of_equal_entropy_are_kept_up_to_the_share(share: float, length: int, kept: int) -> None:
    """0.55 of 100 tokens is 55.00000000000001 in floats."""
    case = tokens([-1.0] * length, entropy=[1.0] * length)
    _, gradient = evaluate_term(term(NLL, "off_policy", top_entropy_share=share), case)
    assert gradient.sum() == -kept


def test_correction_and_top_entropy_mask_multiply() -> None:
    case = tokens([LOG(0.4), LOG(0.4)], mu=[LOG(0.2), LOG(0.2)], entropy=[1.0, 2.0])
    both = term(SURROGATE, correction=ImportanceCorrection(kind="truncate", high=5.0), top_entropy_share=0.5)
    _, gradient = evaluate_term(both, case)
    assert gradient.tolist() == pytest.approx([0.0, -2.0])


SEQUENCE_WIDE = {
    "sequence ratio": term(SequenceSurrogateLoss(kind="sequence_surrogate", clip_low=0.9, clip_high=9.0)),
    "entropy of the row": term(NegativeLogLikelihoodLoss(kind="nll", token_weight="exp_entropy"), "off_policy"),
    "correction": term(SURROGATE, correction=ImportanceCorrection(level="sequence", kind="truncate", high=50.0)),
    "highest entropy": term(NLL, "off_policy", top_entropy_share=0.4),
}


@pytest.mark.parametrize("config", SEQUENCE_WIDE.values(), ids=SEQUENCE_WIDE.keys())
@given(cases=st.lists(sequences(one_advantage=True), min_size=1, max_size=3), data=st.data())
def test_tokens_that_the_term_does_not_select_do_not_enter_what_is_taken_over_a_sequence(config, cases, data):
    """A term over a part of each sequence is the term over sequences of that part alone."""
    chosen = [data.draw(st.lists(st.booleans(), min_size=len(case), max_size=len(case))) for case in cases]
    assume(all(any(part) for part in chosen))
    parts = [
        Tokens(**{name: column[np.array(part)] for name, column in case.__dict__.items()})
        for case, part in zip(cases, chosen, strict=True)
    ]
    selected = [flag for part in chosen for flag in part]
    value, gradient = evaluate_term(config, *cases, selected=selected)
    value_alone, gradient_alone = evaluate_term(config, *parts)
    assert value == pytest.approx(value_alone)
    np.testing.assert_allclose(gradient[selected], gradient_alone, rtol=1e-9, atol=1e-12)
    assert not gradient[~np.array(selected)].any()
