"""Importance correction and the top-entropy mask, through the objective."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from reference import formulas
from reference.token_cases import Tokens, evaluate_term, sequences, term, tokens

from luffy.config.terms import ImportanceCorrection, NegativeLogLikelihoodLoss, SequenceSurrogateLoss, SurrogateLoss

LOG = math.log
SURROGATE = SurrogateLoss(kind="surrogate")
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


def test_correction_and_mask_multiply() -> None:
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
