"""Graders that several evaluations share."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext

import pytest

from luffy.config.grading import GradingConfig
from luffy.grading.pool import GraderPool


@pytest.fixture(scope="module")
def shared_graders() -> Iterator[None]:
    """One pool for each way of grading: to start its workers takes longer than most stages that are asked here."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def pool(config: str) -> GraderPool:
            return stack.enter_context(GraderPool(1, 60.0, GradingConfig.model_validate_json(config)))

        patch.setattr(GraderPool, "configured", lambda workers, config, *_: nullcontext(pool(config.model_dump_json())))
        yield
