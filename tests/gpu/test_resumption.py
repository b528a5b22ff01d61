"""A checkpoint of a policy and a critic on a GPU, where AdamW is fused: what is resumed goes on with the same step."""

import pytest
from reference.elastic_case import assert_resumed_as_if_undisturbed, resume_and_go_on, write_and_go_on

from luffy.config.model import DType

STAGES: dict[DType, tuple[tuple[int, int], ...]] = {
    "float32": ((0, 0), (2, 2), (3, 3), (0, 3)),
    "bfloat16": ((1, 1), (2, 2), (3, 3), (1, 3)),  # ZeRO 0 cannot sum its gradients in float32
}
"""ZeRO stages that write the checkpoint and that read it."""


@pytest.mark.parametrize(
    ("dtype", "written", "read"), [(dtype, *stages) for dtype, pairs in STAGES.items() for stages in pairs]
)
def test_a_resumed_step_is_that_of_an_undisturbed_run(dtype, written, read, tmp_path):
    write_and_go_on(tmp_path, written, dtype)
    resume_and_go_on(tmp_path, read, dtype)
    assert_resumed_as_if_undisturbed(tmp_path, dtype)
