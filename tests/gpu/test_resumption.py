"""A checkpoint of a policy and a critic on a GPU, where AdamW is fused: what is resumed goes on with the same step."""

from pathlib import Path

import pytest
from reference.elastic_case import assert_resumed_as_if_undisturbed, resume_and_go_on, write_and_go_on

from luffy.config.model import DType


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("written", "read"), [(0, 0), (2, 2), (3, 3), (0, 3)])
def test_a_resumed_step_is_that_of_an_undisturbed_run(written: int, read: int, dtype: DType, tmp_path: Path) -> None:
    write_and_go_on(tmp_path, written, dtype)
    resume_and_go_on(tmp_path, read, dtype)
    assert_resumed_as_if_undisturbed(tmp_path, dtype)
