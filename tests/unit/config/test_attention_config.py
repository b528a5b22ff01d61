"""Kinds of attention, and compiled layers, that do not work with other settings are refused before anything starts."""

import pytest

from luffy.config import load_experiment
from luffy.config.settings import StageSettings
from luffy.config.stage_kinds import STAGE_KINDS
from luffy.errors import ConfigError

SHARED = ["execution.sequence_parallel=2"]
COMPILED = "execution.compile=true"
HALF = ["model.dtype=bfloat16", "execution.zero_stage=1"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["execution.attention=flash_attention_2"], "flash_attention_2 cannot compute in model.dtype: float32"),
        (["execution.attention=flash_attention_3"], "flash_attention_3 cannot compute in model.dtype: float32"),
        (["execution.attention=flex"], "attention: flex has no advantage on padded rows; set packing: true"),
        (["execution.attention=flash", *HALF], "sdpa"),
        (SHARED, "sequence_parallel: 2 does not divide ray.trainer_ranks: 1"),
        ([*SHARED, "execution.ray.trainer_ranks=2"], "needs as many ranks, and cluster: local trains in one process"),
        ([*SHARED, "execution.ray.trainer_ranks=2", "execution.attention=flash_attention_2", *HALF],
         "sequence_parallel: 2 does not support attention: flash_attention_2; use sdpa"),
        ([*SHARED, "execution.ray.trainer_ranks=2", COMPILED], "compile: true does not support sequence_parallel: 2"),
        (["execution.zero_stage=3", COMPILED], "compile: true does not support zero_stage: 3"),
        (["execution.cpu_instructions=avx2", COMPILED], "compile: true does not support cpu_instructions: avx2"),
        (["execution.attention=flex", "execution.packing=true", COMPILED],
         "compile: true does not support attention: flex; use compile: false or another setting"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refusal:
        load_experiment("smoke", overrides)
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [[], ["execution.packing=true"], [COMPILED], ["execution.attention=flex", "execution.packing=true"],
     ["execution.attention=flash_attention_2", *HALF],
     ["execution.attention=flash_attention_3", "execution.packing=true", *HALF]],
)  # fmt: skip
def test_neither_changes_what_a_result_is(overrides: list[str]) -> None:
    def settings(*given: str) -> list[StageSettings]:
        config = load_experiment("smoke", [*(HALF if HALF[0] in overrides else []), *given])
        return [STAGE_KINDS[stage].configure(config) for stage in ("base", "sft", "rl")]

    assert settings(*overrides) == settings()
