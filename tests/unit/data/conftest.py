"""One pool for the tests of a file that ask for verdicts."""

from collections.abc import Iterator

import pytest
from support.patience import PATIENCE_S

from luffy.grading.pool import GraderPool


@pytest.fixture(scope="module")
def grader() -> Iterator[GraderPool]:
    with GraderPool(2, PATIENCE_S) as pool:
        yield pool
