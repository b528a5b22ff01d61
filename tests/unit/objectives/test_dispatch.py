"""Every kind of configuration has its function: a forgotten one would fail in the middle of training."""

from collections.abc import Callable
from typing import Any, get_args

import pytest

from luffy.config.terms import AuxiliaryLoss, PolicyGradientLoss
from luffy.objectives import losses, objective

_UNDECIDED = object
"""The class of a dispatcher's first function, which knows no kind."""


def classes_of(union: Any) -> tuple[type, ...]:
    return tuple(kind for part in get_args(union) for kind in (classes_of(part) if get_args(part) else (part,)))


@pytest.mark.parametrize("kind", classes_of(PolicyGradientLoss | AuxiliaryLoss), ids=lambda kind: kind.__name__)
def test_a_loss_has_its_function(kind: type) -> None:
    assert is_registered(losses.token_loss, kind)


@pytest.mark.parametrize("kind", classes_of(PolicyGradientLoss), ids=lambda kind: kind.__name__)
def test_a_policy_gradient_loss_says_which_tokens_it_clips(kind: type) -> None:
    assert is_registered(objective._limited, kind)


def is_registered(dispatcher: Callable[..., Any], kind: type) -> bool:
    return dispatcher.dispatch(kind) is not dispatcher.dispatch(_UNDECIDED)  # type: ignore[attr-defined]
