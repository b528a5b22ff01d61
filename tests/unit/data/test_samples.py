"""The shipped samples are what their README says."""

from pathlib import Path

import pytest
from support.patience import PATIENCE_S

from luffy.config.data import FileSource
from luffy.data.row_filters import grade_traces
from luffy.grading.pool import GraderPool
from luffy.types import Outcome
from tests.synthetic.loaded_source import load_source

SAMPLES = Path(__file__).resolve().parents[3] / "data/samples"


@pytest.mark.parametrize(("name", "count"), [("shop_train", 60), ("shop_test", 100)])
def test_every_sample_row_is_well_formed_and_its_trace_correct(name: str, count: int) -> None:
    loaded = load_source(FileSource(kind="file", path=str(SAMPLES / f"{name}.jsonl")), "train", seed=0)
    assert (len(loaded.prompts), len(loaded.quarantined)) == (count, 0)
    with GraderPool(1, PATIENCE_S) as grader:
        outcomes = grade_traces(loaded.prompts, grader)
    assert {outcome for row in outcomes for outcome in row} == {Outcome.CORRECT}
