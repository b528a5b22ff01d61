"""One pool for the tests of a file that ask for verdicts."""

import pytest
from support.patience import PATIENCE_S

from luffy.grading.pool import GraderPool


@pytest.fixture(scope="module")
def grader():
    with GraderPool(2, PATIENCE_S) as pool:
        yield pool
