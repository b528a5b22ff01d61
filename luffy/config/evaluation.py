"""How checkpoints are evaluated, and held-out accuracy is measured while a stage trains (`sft.validation`)."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt

from luffy.config.grading import GraderKind, GradingConfig
from luffy.config.strict import Fraction, PositiveShare, StrictModel

TEMPLATES = (
    "own", "qwen_math", "qwen_boxed", "r1_zero", "luffy_think", "luffy_simplerl", "prime", "prime_sft", "prime_code",
    "none",
)  # fmt: skip
QUESTION_SLOT = "{question}"


def _checked(template: str) -> str:
    if template not in TEMPLATES and template.count(QUESTION_SLOT) != 1:
        raise ValueError(
            f"must be one of {', '.join(TEMPLATES)}, a text with {QUESTION_SLOT} once, or the path of a file with such "
            f"a text; found {template!r}"
        )
    return template


def template_label(template: str) -> str:
    """The name of a template; for a user's own text, the first eight hexadecimal digits of its SHA-256."""
    return template if template in TEMPLATES else f"own {hashlib.sha256(template.encode()).hexdigest()[:8]}"


Template = Annotated[str, AfterValidator(_checked)]
"""A name, or a text with `{question}`. In an experiment's file also the path of such a text (`luffy.config.load`)."""
VALIDATION = "validation"
"""What `evaluation.only` calls the prompts that `data.validation_prompts` holds out."""
StopText = Annotated[str, Field(min_length=1)]


class DecodingConfig(StrictModel):
    """One way of decoding; temperature 0 is greedy."""

    temperature: NonNegativeFloat
    top_p: PositiveShare = 1.0
    """Nucleus sampling: only the likeliest tokens that together have this probability are sampled."""
    num_samples: PositiveInt = 1
    """Responses per problem; accuracy is their mean (avg@k)."""

    def _complaints(self) -> Iterator[str]:
        if self.is_greedy and self.num_samples > 1:
            yield "greedy decoding gives the same response each time; set num_samples: 1"
        if self.is_greedy and self.top_p < 1:
            yield f"top_p {self.top_p} has no effect on greedy decoding (temperature 0); remove it"

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
    text around the question: one of `luffy.data.prompt_templates`, or your own with `{question}`, here or in a file."""
    stop: tuple[StopText, ...] = ()
    """Texts that end a response (they stay in it), besides those of the template."""
    suites: dict[str, SuiteConfig] = Field(default_factory=dict)
    """Overrides by suite name."""
    only: tuple[str, ...] | None = Field(default=None, min_length=1)
    """Suites to evaluate, or `validation`: the prompts of `data.validation_prompts`. None: all of `data.suites`."""
    engine: Literal["transformers", "vllm", "openai"] = "transformers"
    """What generates the responses: the embedded engine, vLLM (`pip install 'luffy-rl[vllm]'`), or the servers of
    `execution.server` that serve `model.endpoint`."""
    confidence: Fraction = 0.95
    """Level of the intervals."""

    def _complaints(self) -> Iterator[str]:
        sampled = [name for name, suite in self.suites.items() if suite.num_samples is not None]
        if sampled and all(decoding.is_greedy for decoding in self.decodings.values()):
            yield (
                f"suites.{sampled[0]}.num_samples has no effect: every decoding is greedy; remove it or add a decoding "
                "with a temperature"
            )

    def protocol(self, suite: str, decoding: str) -> SuiteProtocol:
        """The resolved settings of a suite under a decoding, both by name."""
        how, own = self.decodings[decoding], self.suites.get(suite, SuiteConfig())
        return SuiteProtocol(
            how.temperature,
            how.top_p,
            how.num_samples if own.num_samples is None or how.is_greedy else own.num_samples,
            own.template or self.template,
            self.stop if own.stop is None else own.stop,
            own.grader,
        )

    def template_of(self, suite: str) -> Template:
        return self.protocol(suite, next(iter(self.decodings))).template

    @property
    def own_graders(self) -> tuple[GraderKind, ...]:
        return tuple(suite.grader for suite in self.suites.values() if suite.grader is not None)


DECODING = "validation"
"""Name of the decoding, which keeps the seeds of a validation apart from those of an evaluation."""
MEASURES = ("accuracy", "truncated_share", "mean_tokens")
"""What `val/SUITE/` has besides the accuracy's interval and the number of problems."""


class KeepBestConfig(StrictModel):
    """Which measured weights become the stage's result, instead of the last ones."""

    metric: str = "accuracy"
    """`accuracy`, the mean over suites; of one suite `SUITE/accuracy`, `SUITE/truncated_share` or `SUITE/mean_tokens`.
    Among equal values the earliest step wins."""
    mode: Literal["max", "min"] = "max"


class ValidationConfig(StrictModel):
    """Measures held-out accuracy before the first step, every N steps, and after the last one. The responses have seeds
    of their own, the same at every step, so that training is the same with and without it and the steps of a curve
    differ by their weights alone. Suites are sampled and graded as in the section `evaluation`."""

    every: PositiveInt
    """Steps between two measurements: RL steps of `rl`, optimizer steps of `sft`."""
    source: Literal["validation"] | None = None
    """`validation`: the prompts that `data.validation_prompts` sets apart. Give this or `suites`."""
    suites: tuple[str, ...] = ()
    """Names of suites of `data.suites`."""
    max_problems: PositiveInt | None = None
    """Only the first problems of each suite; None: all."""
    decoding: DecodingConfig = DecodingConfig(temperature=0.0)
    """Greedy by default; its `num_samples` holds for every suite."""
    max_response_tokens: PositiveInt | None = None
    """None: `rl.max_response_tokens` in RL, `evaluation.max_response_tokens` in SFT."""
    keep_best: KeepBestConfig | None = None
    """The result is the best measured weights; None: the last ones."""
    patience: PositiveInt | None = None
    """End the stage after this many measurements in a row without a new best; None: train to the last step."""

    def _complaints(self) -> Iterator[str]:
        if (self.source is None) == (not self.suites):
            yield "give exactly one of source: validation and suites: [NAME, ...]"
        if len(set(self.suites)) < len(self.suites):
            yield "suites: give each name once"
        if self.keep_best is None and self.patience is not None:
            yield "patience needs keep_best, which defines what has to improve; add keep_best: {}"
        known = ["accuracy", *(f"{suite}/{measure}" for suite in self.names for measure in MEASURES)]
        if self.keep_best is not None and self.keep_best.metric not in known:
            yield f"keep_best.metric: {self.keep_best.metric} is not measured; use {', '.join(known)}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the suites as metrics have them."""
        return self.suites or (VALIDATION,)

    def spelled_out(
        self, evaluation: EvaluationConfig | None, grading: GradingConfig, max_response_tokens: int
    ) -> "HeldOutSettings":
        """The settings for the stage; `max_response_tokens` is the default for this section's field."""
        tokens = self.max_response_tokens or max_response_tokens
        protocol = EvaluationConfig(decodings={DECODING: self.decoding}, max_response_tokens=tokens)
        if evaluation is not None:
            own = {name: found for name in self.suites if (found := _asking(evaluation.suites.get(name))) is not None}
            shared = {name: getattr(evaluation, name) for name in ("template", "stop", "confidence")}
            protocol = protocol.model_copy(update={**shared, "suites": own})
        plain = self.model_copy(update={"decoding": DecodingConfig(temperature=0.0), "max_response_tokens": None})
        return HeldOutSettings(schedule=plain, protocol=protocol, grading=grading)


class HeldOutSettings(StrictModel):
    """A stage's validation, completed with values of other sections."""

    schedule: ValidationConfig
    """Without the values in `protocol`."""
    protocol: EvaluationConfig
    """How suites are sampled and graded, under the one decoding `DECODING`."""
    grading: GradingConfig

    def shows_last_step(self, steps: int) -> bool:
        """Whether a run longer than `steps` would not measure that step, or would choose among more steps."""
        return self.schedule.keep_best is not None or steps % self.schedule.every > 0


def _asking(suite: SuiteConfig | None) -> SuiteConfig | None:
    """How the evaluation samples and grades a suite, without the number of samples; None: like all others."""
    given = {} if suite is None else {name: getattr(suite, name) for name in suite.model_fields_set - {"num_samples"}}
    return SuiteConfig(**given) if given else None
