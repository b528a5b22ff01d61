"""The proof over two ranks: every preset, for each ZeRO setting, against the float64 reference."""

import json
from pathlib import Path

import pytest
from ranks import on_ranks

ZERO = (
    {"zero_stage": 0},
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"zero_stage": 2, "offload_optimizer": True},
    {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one setting leaves the float64 references for the next."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.slow
@pytest.mark.parametrize("zero", ZERO, ids=json.dumps)
def test_two_ranks_give_the_reference_gradient_and_step(
    zero: dict[str, object], tmp_path: Path, references: Path
) -> None:
    assert_reference_step(zero, tmp_path, references)


@pytest.mark.slow
def test_two_ranks_that_share_every_sequence_give_the_reference_gradient_and_step(
    tmp_path: Path, references: Path
) -> None:
    assert_reference_step({"zero_stage": 2, "sequence_parallel": 2}, tmp_path, references)


def assert_reference_step(settings: dict[str, object], folder: Path, references: Path) -> None:
    for case, errors in on_ranks("gradient_worker.py", settings, str(folder), str(references)).items():
        assert errors["gradient"] < 1e-5, (case, errors)
        assert errors["parameters"] < 1e-5, (case, errors)
        # The movement is 1e-3 of the parameters, so float32 rounding of the parameters shows in its fourth digit.
        assert errors["movement"] < 1e-3, (case, errors)
