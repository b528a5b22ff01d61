"""A run goes on over another number of ranks, or under another ZeRO stage, as if nothing had happened."""

from pathlib import Path

import pytest
from reference.elastic_case import assert_resumed_as_if_undisturbed, resume_and_go_on, write_and_go_on
from support.ranks import on_ranks

from luffy.config.model import DType

LAYOUTS: list[tuple[int, int, DType]] = [
    (0, 0, "float32"), (2, 2, "float32"), (3, 3, "float32"), (3, 0, "float32"), (1, 1, "bfloat16"), (2, 3, "bfloat16"),
]  # fmt: skip
"""ZeRO when written and when resumed, and the weights' type; ZeRO 1 in bfloat16 is a class of its own."""


def _stages(folder: Path) -> list[Path]:
    return [folder / "_".join(map(str, layout)) for layout in LAYOUTS]


@pytest.mark.slow
def test_two_ranks_resume_as_one_and_no_rank_waits_for_one_that_failed(tmp_path):
    stages = list(zip(_stages(tmp_path), LAYOUTS, strict=True))
    on_ranks("write", [(stage, written, dtype) for stage, (written, _, dtype) in stages])
    for stage, (_, read, dtype) in stages:
        resume_and_go_on(stage, read, dtype)
        assert_resumed_as_if_undisturbed(stage, dtype)
    told = on_ranks("faults", tmp_path / "faults")
    for rank, fault in enumerate(("CheckpointError: rank 1 failed at the checkpoint: OSError", "OSError")):
        assert told[rank]["write_engine"] == told[rank]["read_engine"] == f"{fault}: no space left"
        assert "the ranks see different checkpoints" in told[rank]["step"]
        assert told[rank]["newest"] == "1"


@pytest.mark.slow
def test_one_rank_resumes_as_two(tmp_path):
    stages = list(zip(_stages(tmp_path), LAYOUTS, strict=True))
    for stage, (written, _, dtype) in stages:
        write_and_go_on(stage, written, dtype)
    on_ranks("resume", [(stage, read, dtype) for stage, (_, read, dtype) in stages])
    for stage, (_, _, dtype) in stages:
        assert_resumed_as_if_undisturbed(stage, dtype)
