"""Rules of evaluations and of validation while training: which suites there are."""

import difflib

from luffy.config.evaluation import VALIDATION
from luffy.config.experiment import ExperimentConfig
from luffy.config.validation import ValidationConfig


def evaluated_suites_exist(config: ExperimentConfig) -> None:
    """Settings of suites name suites of the data."""
    unknown = sorted(set(config.evaluation.suites) - set(config.data.suites)) if config.evaluation else []
    if unknown:
        close = difflib.get_close_matches(unknown[0], config.data.suites, n=1, cutoff=0.5)
        raise ValueError(
            f"evaluation.suites: no suite is called {', '.join(unknown)}"
            + (f"; did you mean {close[0]!r}?" if close else "")
            + f"; those of data.suites are {', '.join(config.data.suites)}"
        )


def validations_can_be_measured(config: ExperimentConfig) -> None:
    """A validation has its prompts or suites, and happens within the stage's steps."""
    sections = {"sft": config.sft, "rl": config.rl}
    for name, section in sections.items():
        if name not in config.stages or section is None or section.validation is None:
            continue
        try:
            section.validation.check(section.steps, config.data.validation_prompts, config.data.suites)
        except ValueError as error:
            raise ValueError(f"{name}.validation.{error}") from None
    if "sft" in config.stages and config.sft is not None and config.sft.validation is not None:
        _check_validation_of_sft(config, config.sft.validation)


def _check_validation_of_sft(config: ExperimentConfig, validation: ValidationConfig) -> None:
    """Raise ValueError for options that SFT does not support, because its own ranks generate."""
    if validation.max_response_tokens is None and config.evaluation is None:
        raise ValueError("sft.validation.max_response_tokens: missing; its default is that of evaluation")
    ranks = config.execution.ray.trainer_ranks if config.cluster == "ray" else 1
    if ranks > 1 and config.execution.zero_stage == 3:
        raise ValueError(
            "sft.validation: ranks that share their weights (execution.zero_stage: 3) cannot generate each on its "
            "own; use zero_stage 1 or 2, or evaluate after training"
        )


def only_evaluated_suites_exist(config: ExperimentConfig) -> None:
    """`evaluation.only` names suites, each once."""
    only = config.evaluation.only if config.evaluation is not None else None
    for name in only or ():
        if name == VALIDATION and VALIDATION in config.data.suites:
            raise ValueError("evaluation.only: validation is also a suite of data.suites; give that another name")
        if name == VALIDATION and not config.data.validation_prompts:
            raise ValueError("evaluation.only: validation has no prompts; set data.validation_prompts")
        if name not in (*config.data.suites, VALIDATION):
            raise ValueError(
                f"evaluation.only: no suite is called {name!r}; there are {', '.join(config.data.suites)}, and "
                f"{VALIDATION} with data.validation_prompts"
            )
    if only and len(set(only)) < len(only):
        raise ValueError("evaluation.only: names a suite twice")
