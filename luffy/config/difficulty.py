"""Selection of RL's training prompts by a policy's pass rates."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from luffy.config.evaluation import StopText
from luffy.config.strict import StrictModel, without_unused
from luffy.config.training import RLConfig

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class DifficultyConfig(StrictModel):
    """Selection of RL's prompts by pass rate. This section adds the stage `difficulty` to a chain with RL.

    A prompt whose responses are all correct, or all wrong, gives its rollouts no advantage. Prompts that are never
    solved stay by default: in a mixed group the demonstration still teaches.
    """

    policy: Literal["base", "sft"] = "base"
    """The policy whose pass rates are measured; the stage runs after the one that makes this policy."""
    num_samples: PositiveInt = 8
    """Responses per prompt."""
    temperature: PositiveFloat | None = None
    """None: `rl.temperature`."""
    max_response_tokens: PositiveInt | None = None
    """None: `rl.max_response_tokens`."""
    stop: tuple[StopText, ...] | None = None
    """Texts that end a response; None: `rl.stop`."""
    min_pass_rate: Rate = 0.0
    """Lowest pass rate that is kept, inclusive."""
    max_pass_rate: Rate = 0.9
    """Highest pass rate that is kept, inclusive."""
    engine: Literal["transformers", "vllm", "openai"] | None = None
    """The engine that generates the responses; None: RL's engine (`cluster`, `rl.engine`)."""

    @model_serializer(mode="wrap")
    def _serialized(self, dump: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, object]:
        return without_unused(dump(self), {"stop": []}, info.context)

    def spelled_out(self, rl: RLConfig, cluster: Literal["local", "ray"]) -> "DifficultyConfig":
        """This section with its defaults filled in from other sections."""
        of_cluster = "vllm" if cluster == "ray" else "transformers"
        return self.model_copy(
            update={
                "temperature": self.temperature or rl.temperature,
                "max_response_tokens": self.max_response_tokens or rl.max_response_tokens,
                "stop": rl.stop if self.stop is None else self.stop,
                "engine": self.engine or (of_cluster if rl.engine == "cluster" else rl.engine),
            }
        )

    @model_validator(mode="after")
    def _some_rate_is_within(self) -> "DifficultyConfig":
        low, high, total = self.min_pass_rate, self.max_pass_rate, self.num_samples
        if low > high:
            raise ValueError(f"min_pass_rate {low:g} is above max_pass_rate {high:g}; swap them")
        if not any(low <= correct / total <= high for correct in range(total + 1)):
            raise ValueError(
                f"no prompt could be kept: no pass rate over {total} responses lies between min_pass_rate {low:g} and "
                f"max_pass_rate {high:g}; widen the range or raise num_samples"
            )
        return self
