"""Evaluations of a workspace as DataFrames."""

import subprocess
import sys
from pathlib import Path

import pytest
from synthetic.evaluated_workspace import first, write_evaluation

import luffy
from luffy.errors import DataError
from luffy.pipeline.workspace import Workspace


@pytest.fixture
def workspace(tmp_path) -> Path:
    found = Workspace(tmp_path / "w")
    write_evaluation(
        found, "e1", {("sums", "greedy"): first(40), ("sums", "sampled"): lambda problem, sample: sample == 0}
    )
    write_evaluation(found, "e2", {("sums", "greedy"): first(70)}, checkpoint="rl", day=2)
    return tmp_path / "w"


def test_every_result_is_a_row_with_its_protocol_and_interval(workspace):
    frame = luffy.load_results(workspace)
    greedy = frame[frame["decoding"] == "greedy"].set_index("evaluation")
    assert greedy["accuracy"].to_dict() == {"e1": 0.4, "e2": 0.7}
    assert (frame["low"] < frame["accuracy"]).all() and (frame["accuracy"] < frame["high"]).all()
    assert set(greedy["temperature"]) == {0.0} and set(greedy["num_problems"]) == {100}
    assert list(frame["ended"]) == sorted(frame["ended"], reverse=True)
    sampled = frame.set_index("decoding").loc["sampled"]
    assert (sampled["pass_at_k"], sampled["num_samples"]) == (1.0, 4)
    assert greedy["pass_at_k"].isna().all()  # of a single response


def test_problems_add_up_to_the_accuracy(workspace):
    problems = luffy.load_problem_results(workspace)
    shares = problems.groupby(["evaluation", "decoding"])[["correct", "num_samples"]].sum()
    assert (shares["correct"] / shares["num_samples"]).to_dict() == {
        ("e1", "greedy"): 0.4, ("e1", "sampled"): 0.25, ("e2", "greedy"): 0.7,
    }  # fmt: skip


def test_every_column_is_documented(workspace):
    for load in (luffy.load_results, luffy.load_problem_results):
        assert load.__doc__ is not None
        assert [name for name in load(workspace).columns if f"`{name}`" not in load.__doc__] == []


def test_a_workspace_without_evaluations_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no finished evaluation"):
        luffy.load_results(tmp_path)


def test_importing_luffy_loads_no_library():
    code = "import sys, luffy; print(sorted({'pandas', 'numpy', 'torch', 'scipy', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
