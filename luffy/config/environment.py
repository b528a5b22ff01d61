"""What answers the policy between its turns: the kinds of environments."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from luffy.config.sandbox import SandboxConfig
from luffy.config.strict import StrictModel
from luffy.config.verifiers_package import VerifiersPackage

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


_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
_Import = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
LANES = 16
"""Calls of an engine that episodes make at the same time, where it can answer several."""
ANSWER = "answer"
"""Name of the grader's reward among the weights."""


class EpisodeScoring(StrictModel):
    """What is measured of an episode, and what of it is rewarded (the rubric)."""

    measures: dict[_Name, _Import] = Field(default={})
    """Functions by name, `package.module:function`, of any of `prompt, completion, answer, info, task, counts`, as in
    verifiers; they return a number and may be asynchronous. Every measure is logged and kept with its sample."""
    weights: dict[str, float] = Field(default={ANSWER: 1.0}, min_length=1)
    """The reward of an episode: the weighted sum of `answer` (the grader's reward), of measures, of `turns`, and of
    what the environment counts, e.g. `tool_errors: -0.1`."""
    version: NonNegativeInt = 0
    """The functions' code is not part of a stage's identity: increase this when it changes."""

    @property
    def is_answer_alone(self) -> bool:
        """Whether the reward is the grader's."""
        return self.weights == {ANSWER: 1.0}


class ToolsEnvironment(StrictModel):
    """Python functions that the policy may call. A turn without a call is the final one."""

    kind: Literal["tools"]
    tools: tuple[str, ...] = Field(min_length=1)
    """Names of built-in tools (`calculator`, `python`), or `package.module:function` of functions with typed parameters
    and a docstring, importable from the working directory or the environment."""
    version: NonNegativeInt = 0
    """The functions' code is not part of a stage's identity: increase this when it changes."""
    calls: CallFormat = "hermes"
    describe: bool = True
    """Whether the system message describes the tools; false for a policy that knows them from demonstrations alone."""
    timeout_s: PositiveFloat = 10.0
    """Limit of one call; the policy is told of a call that takes longer."""
    max_calls: PositiveInt = 16
    """Calls in one turn; the policy is told how many were not run."""
    max_result_characters: PositiveInt = 8192
    """A longer result of a call is cut in the middle, and says so."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where the tool `python` runs the policy's code. Its limits hold for that tool, in place of `timeout_s`."""
    limits: EpisodeLimits = EpisodeLimits()
    scoring: EpisodeScoring = EpisodeScoring()

    @model_validator(mode="after")
    def _the_sandbox_is_used(self) -> "ToolsEnvironment":
        if "python" not in self.tools and self.sandbox != SandboxConfig():
            raise ValueError("sandbox has no effect without the tool python; remove it, or add python to tools")
        return self


class GuessNumberEnvironment(StrictModel):
    """A game of several turns: find a number by guessing, with `higher` or `lower` as the answer."""

    kind: Literal["guess_number"]
    limits: EpisodeLimits = EpisodeLimits()
    scoring: EpisodeScoring = EpisodeScoring()


class CustomEnvironment(StrictModel):
    """A class of your own with the methods of `luffy.environments.Environment`."""

    kind: Literal["custom"]
    factory: _Import
    """`package.module:Class`, called with `options` for every episode."""
    version: NonNegativeInt = 0
    """The class's code is not part of a stage's identity: increase this when it changes."""
    options: dict[str, int | float | bool | str | None] = Field(default={})
    instructions: str = ""
    """Added to the system message of every prompt."""
    limits: EpisodeLimits = EpisodeLimits()
    scoring: EpisodeScoring = EpisodeScoring()


class VerifiersEnvironment(VerifiersPackage):
    """An environment of the package verifiers, unchanged: it answers the policy and scores the episode.

    Prompts are those of the data source `verifiers`. Their grader, `environment`, takes the environment's own reward.
    """

    kind: Literal["verifiers"]
    calls: CallFormat = "hermes"
    """How the policy writes calls of the environment's tools, where it has some."""
    describe: bool = True
    """Whether the system message describes the tools."""
    limits: EpisodeLimits = EpisodeLimits()
    scoring: EpisodeScoring = EpisodeScoring()
    """`reward` and the environment's reward functions can be weighed by their names."""


EnvironmentConfig = Annotated[
    ToolsEnvironment | GuessNumberEnvironment | CustomEnvironment | VerifiersEnvironment, Field(discriminator="kind")
]


def keeps_history(environment: EnvironmentConfig | None) -> bool:
    """Whether traces and episodes of many turns are accepted under a chat template that rewrites earlier turns."""
    return environment is not None and environment.limits.history == "as_sampled"
