"""Which training prompts RL is given, by how often a policy solves them."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from luffy.config.strict import StrictModel
from luffy.config.training import RLConfig

Rate = Annotated[float, Field(ge=0.0, le=1.0)]


class DifficultyConfig(StrictModel):
    """The section alone puts the stage `difficulty` into a chain with RL, whose only reader RL is.

    A prompt whose responses are all correct, or all wrong, gives a group of rollouts no advantage. Never solved ones
    stay by default: in a mixed group their demonstration teaches what no rollout finds.
    """

    policy: Literal["base", "sft"] = "base"
    """Whose pass rate it is; the stage runs after the one that makes this policy."""
    num_samples: PositiveInt = 8
    """Responses a prompt."""
    temperature: PositiveFloat | None = None
    """None: `rl.temperature`."""
    max_response_tokens: PositiveInt | None = None
    """None: `rl.max_response_tokens`."""
    min_pass_rate: Rate = 0.0
    """A prompt that is solved less often is too hard; one of this very rate stays."""
    max_pass_rate: Rate = 0.9
    """A prompt that is solved more often is too easy; one of this very rate stays."""
    engine: Literal["transformers", "vllm", "openai"] | None = None
    """What generates the responses; None: what RL draws its own with (`cluster`, `rl.engine`)."""

    def spelled_out(self, rl: RLConfig, cluster: Literal["local", "ray"]) -> "DifficultyConfig":
        """The same with nothing left to other sections."""
        of_cluster = "vllm" if cluster == "ray" else "transformers"
        return self.model_copy(
            update={
                "temperature": self.temperature or rl.temperature,
                "max_response_tokens": self.max_response_tokens or rl.max_response_tokens,
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
                f"no prompt could stay: of {total} responses, no number makes a share between min_pass_rate {low:g} "
                f"and max_pass_rate {high:g}; widen the range or raise num_samples"
            )
        return self
