"""Traces that the policy makes itself: how it is sampled, and how often it learns from what it got right."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from luffy.config.evaluation import StopText
from luffy.config.kept_answers import KeepAnswers
from luffy.config.strict import StrictModel, is_none


class SampleConfig(StrictModel):
    """The stage `sample`: the policy answers the training prompts, and SFT learns from what it got right."""

    num_samples: PositiveInt = 8
    """Responses per prompt."""
    seed: NonNegativeInt | None = Field(default=None, exclude_if=is_none)
    """Seed of this stage alone; None: the experiment's. Lets seeds share data and base."""
    temperature: PositiveFloat = 1.0
    max_response_tokens: PositiveInt | None = None
    """None: `data.max_trace_tokens`."""
    engine: Literal["transformers", "vllm", "openai"] | None = None
    """The engine that generates the responses; None: `vllm` with `cluster: ray`, else `transformers`."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response."""
    keep: KeepAnswers = KeepAnswers()

    def spelled_out(self, max_trace_tokens: int, cluster: Literal["local", "ray"]) -> "SampleConfig":
        """This section with its defaults filled in from other sections."""
        return self.model_copy(
            update={
                "max_response_tokens": self.max_response_tokens or max_trace_tokens,
                "engine": self.engine or ("vllm" if cluster == "ray" else "transformers"),
            }
        )


class ExpertIterationConfig(StrictModel):
    """How often a chain with `sample` repeats sampling and SFT. One round is rejection-sampling fine-tuning."""

    rounds: PositiveInt = 1
    start_from: Literal["base", "previous"] = "base"
    """The weights that each round's SFT starts from. `base`: those that round 1 sampled, as STaR (arXiv 2203.14465)
    and ReST-EM (2312.06585) do, so that errors of a round do not stay; `previous`: those of the round before. The
    newest policy is sampled either way."""

    @model_validator(mode="after")
    def _a_round_before(self) -> "ExpertIterationConfig":
        if self.rounds == 1 and self.start_from == "previous":
            raise ValueError("start_from: previous has no effect with rounds: 1; raise rounds or remove it")
        return self
