"""Which of a model's correct answers to a prompt become its traces."""

from typing import Literal

from pydantic import PositiveInt, model_validator

from luffy.config.strict import StrictModel


class KeepAnswers(StrictModel):
    """The correct, complete answers to a prompt that are kept as its traces; equal texts count once."""

    choose: Literal["first", "shortest", "diverse"] = "first"
    """`first` in the order of sampling (one per prompt: STaR, arXiv 2203.14465); `shortest` by tokens; `diverse`: the
    first, then always the answer that is farthest from those already chosen (different reasoning paths as in RFT, arXiv
    2308.01825)."""
    max_per_prompt: PositiveInt = 1

    @model_validator(mode="after")
    def _diverse_chooses_several(self) -> "KeepAnswers":
        if self.choose == "diverse" and self.max_per_prompt == 1:
            raise ValueError("choose: diverse keeps the first answer with max_per_prompt: 1; raise it or use first")
        return self
