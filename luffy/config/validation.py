"""Held-out accuracy while a stage trains: `sft.validation` and `rl.validation`."""

import difflib
from collections.abc import Collection
from typing import Literal

from pydantic import PositiveInt, model_validator

from luffy.config.evaluation import VALIDATION, DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import GradingConfig
from luffy.config.strict import StrictModel

DECODING = "validation"
"""Name of the decoding, which keeps the seeds of a validation apart from those of an evaluation."""
MEASURES = ("accuracy", "truncated_share", "mean_tokens")
"""What `val/SUITE/` has besides the accuracy's interval and the number of problems."""


class KeepBestConfig(StrictModel):
    """Which measured weights become the stage's result, instead of the last ones."""

    metric: str = "accuracy"
    """`accuracy` is the mean over suites; `SUITE/accuracy`, `SUITE/truncated_share` and `SUITE/mean_tokens` are those
    of one suite. Among equal values the earliest step wins."""
    mode: Literal["max", "min"] = "max"


class ValidationConfig(StrictModel):
    """Measures held-out accuracy before the first step, every N steps, and after the last one.

    The responses have seeds of their own, the same at every step, so that training is the same with and without it and
    the steps of a curve differ by their weights alone. Suites are sampled and graded as in the section `evaluation`.
    """

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

    @model_validator(mode="after")
    def _has_problems(self) -> "ValidationConfig":
        if (self.source is None) == (not self.suites):
            raise ValueError("give exactly one of source: validation and suites: [NAME, ...]")
        if len(set(self.suites)) < len(self.suites):
            raise ValueError("suites: give each name once")
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> "ValidationConfig":
        if self.keep_best is None:
            if self.patience is not None:
                raise ValueError("patience needs keep_best, which defines what has to improve; add keep_best: {}")
            return self
        known = ["accuracy", *(f"{suite}/{measure}" for suite in self.names for measure in MEASURES)]
        if self.keep_best.metric not in known:
            raise ValueError(f"keep_best.metric: {self.keep_best.metric} is not measured; use {', '.join(known)}")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the suites as metrics have them."""
        return self.suites or (VALIDATION,)

    def check(self, steps: int | None, num_set_apart: int, known_suites: Collection[str]) -> None:
        """Raise ValueError for a measurement that the rest of the experiment leaves without problems or steps.

        `steps` is None if only the data determines it.
        """
        if self.source is not None and not num_set_apart:
            raise ValueError(
                "source: validation is empty; set data.validation_prompts, the number of training prompts set apart"
            )
        for name in self.suites:
            if name not in known_suites:
                close = difflib.get_close_matches(name, known_suites, n=1, cutoff=0.5)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"suites: no suite is called {name}{hint}; those of data.suites are {', '.join(known_suites)}"
                )
        self.check_length(steps)

    def check_length(self, steps: int | None) -> None:
        """Raise ValueError if training is too short for a measurement between the first and the last step."""
        if steps is not None and self.every > steps:
            raise ValueError(f"every {self.every} is above the stage's {steps} steps; lower it")

    def spelled_out(
        self, evaluation: EvaluationConfig | None, grading: GradingConfig, max_response_tokens: int
    ) -> "HeldOutSettings":
        """The settings for the stage; `max_response_tokens` is the default for this section's field."""
        tokens = self.max_response_tokens or max_response_tokens
        protocol = EvaluationConfig(decodings={DECODING: self.decoding}, max_response_tokens=tokens)
        if evaluation is not None:
            overrides = {name: own for name in self.suites if (own := _asking(evaluation.suites.get(name))) is not None}
            protocol = protocol.model_copy(
                update={
                    "template": evaluation.template,
                    "stop": evaluation.stop,
                    "suites": overrides,
                    "confidence": evaluation.confidence,
                }
            )
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
