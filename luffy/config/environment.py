"""What answers the policy between its turns: the kinds of environments."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from luffy.config.strict import StrictModel

CallFormat = Literal["hermes", "llama3", "xml"]
"""How a model family writes a tool call: Hermes and Qwen, Llama 3.1, or plain XML elements."""


class EpisodeLimits(StrictModel):
    """Bounds of an episode, in turns of the policy and in tokens; the finish reason names the one that was reached."""

    max_turns: PositiveInt = 8
    """Turns of the policy. An episode that would go on after them ends there."""
    max_turn_tokens: PositiveInt | None = None
    """Limit of one turn of the policy; None: only the limit of the whole response holds."""
    max_observation_tokens: PositiveInt = 1024
    """A longer message of the environment is cut in the middle, and says so."""
    history: Literal["exact", "as_sampled"] = "exact"
    """`exact` refuses a chat template that rewrites earlier turns (Qwen3's drops their reasoning). `as_sampled` accepts
    it and keeps the turns as they were sampled, which is not how such a model was trained."""
    max_failed_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """The stage ends when more than this share of a step's episodes failed by a fault of the environment."""

    @property
    def keeps_history(self) -> bool:
        """Whether turns are kept as they were sampled, whatever the chat template makes of them."""
        return self.history == "as_sampled"


class ToolsEnvironment(StrictModel):
    """Python functions that the policy may call. A turn without a call is the final one."""

    kind: Literal["tools"]
    tools: tuple[str, ...] = Field(min_length=1)
    """Names of built-in tools (`calculator`), or `package.module:function` of functions with typed parameters and a
    docstring, importable from the working directory or the environment."""
    calls: CallFormat = "hermes"
    describe: bool = True
    """Whether the system message describes the tools; false for a policy that knows them from demonstrations alone."""
    timeout_s: PositiveFloat = 10.0
    """Limit of one call; the policy is told of a call that takes longer."""
    max_calls: PositiveInt = 16
    """Calls in one turn; the policy is told how many were not run."""
    max_result_characters: PositiveInt = 8192
    """A longer result of a call is cut in the middle, and says so."""
    limits: EpisodeLimits = EpisodeLimits()


class GuessNumberEnvironment(StrictModel):
    """A game of several turns: find a number by guessing, with `higher` or `lower` as the answer."""

    kind: Literal["guess_number"]
    limits: EpisodeLimits = EpisodeLimits()


class CustomEnvironment(StrictModel):
    """A class of your own with the methods of `luffy.environments.Environment`."""

    kind: Literal["custom"]
    factory: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:Class`, called with `options` for every episode."""
    options: dict[str, int | float | bool | str | None] = Field(default={})
    instructions: str = ""
    """Added to the system message of every prompt."""
    limits: EpisodeLimits = EpisodeLimits()


EnvironmentConfig = Annotated[
    ToolsEnvironment | GuessNumberEnvironment | CustomEnvironment, Field(discriminator="kind")
]
