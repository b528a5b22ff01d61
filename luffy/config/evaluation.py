"""How checkpoints are evaluated."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, model_validator

from luffy.config.grading import GraderKind
from luffy.config.strict import StrictModel, is_none

TEMPLATES = ("own", "qwen_math", "qwen_boxed", "r1_zero", "luffy_think", "prime", "none")
QUESTION_SLOT = "{question}"


def _checked_template(template: str) -> str:
    if template not in TEMPLATES and template.count(QUESTION_SLOT) != 1:
        raise ValueError(
            f"must be one of {', '.join(TEMPLATES)}, a text with {QUESTION_SLOT} once, or the path of a file with such "
            f"a text; found {template!r}"
        )
    return template


def template_label(template: str) -> str:
    """The name of a template; for a user's own text, the first eight hexadecimal digits of its SHA-256."""
    return template if template in TEMPLATES else f"own {hashlib.sha256(template.encode()).hexdigest()[:8]}"


Template = Annotated[str, AfterValidator(_checked_template)]
"""A name, or the text itself, with `{question}` where the question goes. In a file of an experiment also the path of a
file with the text (`luffy.config.template_files`)."""
VALIDATION = "validation"
"""What `evaluation.only` calls the prompts that `data.validation_prompts` holds out."""
StopText = Annotated[str, Field(min_length=1)]


class DecodingConfig(StrictModel):
    """One way of decoding; temperature 0 is greedy."""

    temperature: NonNegativeFloat
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling: only the likeliest tokens that together have this probability are sampled."""
    num_samples: PositiveInt = 1
    """Responses per problem; accuracy is their mean (avg@k)."""

    @model_validator(mode="after")
    def _greedy_once(self) -> "DecodingConfig":
        if self.is_greedy and self.num_samples > 1:
            raise ValueError("greedy decoding gives the same response each time; set num_samples: 1")
        if self.is_greedy and self.top_p < 1:
            raise ValueError(f"top_p {self.top_p} has no effect on greedy decoding (temperature 0); remove it")
        return self

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class SuiteConfig(StrictModel):
    """Overrides for one suite; fields left out keep the common setting."""

    num_samples: PositiveInt | None = None
    """Responses per problem under every decoding that is not greedy."""
    template: Template | None = None
    stop: tuple[StopText, ...] | None = None
    grader: GraderKind | None = None
    """Its grader; overrides `grading` and the grader named in rows."""

    @model_validator(mode="after")
    def _says_something(self) -> "SuiteConfig":
        if not self.model_fields_set:
            raise ValueError(f"is empty; give one of {', '.join(SuiteConfig.model_fields)}, or remove it")
        return self


@dataclass(frozen=True, slots=True)
class SuiteProtocol:
    """How responses to one suite are sampled and graded under one decoding."""

    temperature: float
    top_p: float
    num_samples: int
    template: Template
    stop: tuple[str, ...]
    """Besides what the template stops at."""
    grader: GraderKind | None
    """None: the graders of `grading` and of the rows."""


class EvaluationConfig(StrictModel):
    """The evaluation protocol, which all checkpoints of a chain share."""

    decodings: dict[str, DecodingConfig] = Field(
        default={"greedy": DecodingConfig(temperature=0.0), "sampled": DecodingConfig(temperature=1.0, num_samples=4)},
        min_length=1,
    )
    """Decodings by name; the first one makes the headline table."""
    max_response_tokens: PositiveInt
    template: Template = "own"
    """How a problem becomes a prompt: `own` is the model's chat template over the data's messages, any other a fixed
    text around the question alone: one of `luffy.data.prompt_templates` by name, or your own with `{question}` in it,
    written here or in a file whose path is given."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response (they stay in it), besides those of the template."""
    suites: dict[str, SuiteConfig] = Field(default_factory=dict)
    """Overrides by suite name."""
    only: tuple[str, ...] | None = Field(default=None, min_length=1, exclude_if=is_none)
    """Suites to evaluate; `validation` names the prompts that `data.validation_prompts` holds out of training. None:
    all of `data.suites`."""
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    """What generates the responses: the embedded engine, vLLM (`pip install 'luffy-rl[vllm]'`), or the servers of
    `execution.server`: vLLM's, which are given each checkpoint's weights, or those that serve `model.endpoint`."""
    confidence: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    """Level of the intervals."""

    @model_validator(mode="after")
    def _samples_are_drawn(self) -> "EvaluationConfig":
        sampled = [name for name, suite in self.suites.items() if suite.num_samples is not None]
        if sampled and all(decoding.is_greedy for decoding in self.decodings.values()):
            raise ValueError(
                f"suites.{sampled[0]}.num_samples has no effect: every decoding is greedy; remove it or add a decoding "
                "with a temperature"
            )
        return self

    def protocol(self, suite: str, decoding: str) -> SuiteProtocol:
        """The resolved settings of a suite under a decoding, both by name."""
        how, own = self.decodings[decoding], self.suites.get(suite)
        if own is None:
            return SuiteProtocol(how.temperature, how.top_p, how.num_samples, self.template, self.stop, None)
        return SuiteProtocol(
            how.temperature,
            how.top_p,
            how.num_samples if own.num_samples is None or how.is_greedy else own.num_samples,
            own.template or self.template,
            self.stop if own.stop is None else own.stop,
            own.grader,
        )

    def template_of(self, suite: str) -> Template:
        """Prompt template of the suite, under every decoding."""
        return self.protocol(suite, next(iter(self.decodings))).template

    @property
    def own_graders(self) -> tuple[GraderKind, ...]:
        """Graders that single suites set for themselves."""
        return tuple(suite.grader for suite in self.suites.values() if suite.grader is not None)
