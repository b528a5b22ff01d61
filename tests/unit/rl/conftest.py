"""What all of these tests share: one pool of graders, and the scripted runs that several of them read."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
from support.patience import PATIENCE_S

from luffy.grading.pool import GraderPool

pytest.register_assert_rewrite("synthetic.scripted_runs")  # its assertions show what differs
from synthetic.scripted_runs import STEPS, Run, scripted_run, settings_of  # noqa: E402


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(1, PATIENCE_S) as pool:
        yield pool


@pytest.fixture(scope="module")
def run(grader: GraderPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The run of a method under overrides; each is made once."""

    @cache
    def made(method: str, *overrides: str, steps: int = STEPS) -> Run:
        settings = settings_of(method, *overrides, steps=steps)
        return scripted_run(settings, grader, tmp_path_factory.mktemp("journal"))

    return made
