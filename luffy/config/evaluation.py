"""How checkpoints are evaluated."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from luffy.config.grading import GraderKind
from luffy.config.strict import StrictModel


class DecodingConfig(StrictModel):
    """One way of decoding; temperature 0 is greedy."""

    temperature: NonNegativeFloat
    num_samples: PositiveInt = 1
    """Responses a problem; accuracy is their mean (avg@k)."""

    @model_validator(mode="after")
    def _greedy_once(self) -> "DecodingConfig":
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError("greedy decoding gives the same response each time; set num_samples: 1")
        return self


class EvaluationConfig(StrictModel):
    """The protocol; every checkpoint of the chain is evaluated by the same."""

    decodings: dict[str, DecodingConfig] = Field(
        default={"greedy": DecodingConfig(temperature=0.0), "sampled": DecodingConfig(temperature=1.0, num_samples=4)},
        min_length=1,
    )
    """Decodings by name; the first one makes the headline table."""
    max_response_tokens: PositiveInt
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    """What generates the responses: the embedded engine, vLLM (`pip install 'luffy[vllm]'`), or the vLLM servers of
    `execution.server`, which are given each checkpoint's weights."""
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Level of the intervals."""
    graders: dict[str, GraderKind] = Field(default_factory=dict)
    """How a suite is graded, by its name, whatever `grading` and its rows say."""
