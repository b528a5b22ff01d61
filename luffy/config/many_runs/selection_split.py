"""What values are chosen on, and what is reported: never the same problems."""

from luffy.config.evaluation import VALIDATION, EvaluationConfig
from luffy.config.experiment import ExperimentConfig
from luffy.config.many_runs.comparison_config import SelectConfig


def check_selection(config: ExperimentConfig, select: SelectConfig) -> None:
    """Raise ValueError, beginning with the key of `select`, where `config` cannot be chosen on it or reports it."""
    evaluation, suites = _evaluation_of(config), config.data.suites
    if select.on == VALIDATION and VALIDATION in suites:
        raise ValueError("on: validation is also a suite of data.suites; give that another name")
    if select.on == VALIDATION and not config.data.validation_prompts:
        raise ValueError("on: the validation split has no prompts; set data.validation_prompts, or name a suite")
    if select.on not in (*suites, VALIDATION):
        raise ValueError(f"on: no suite is called {select.on!r}; there are {', '.join(suites)}, or {VALIDATION}")
    if select.on in (evaluation.only or ()):
        raise ValueError(f"on: {select.on} is also reported (evaluation.only); values are not chosen on what is")
    if set(suites) == {select.on}:
        raise ValueError(f"on: {select.on} is the only suite, which leaves none to report; set one apart")
    if select.decoding not in (None, *evaluation.decodings):
        names = ", ".join(evaluation.decodings)
        raise ValueError(f"decoding: no decoding is called {select.decoding!r}; there are {names}")


def decoding_of(config: ExperimentConfig, select: SelectConfig) -> str:
    """Name of the decoding that decides."""
    return select.decoding or next(iter(_evaluation_of(config).decodings))


def reported_evaluation(config: ExperimentConfig, select: SelectConfig | None) -> EvaluationConfig:
    """The experiment's evaluation, without the suite that values are chosen on."""
    evaluation = _evaluation_of(config)
    if select is None or select.on == VALIDATION or evaluation.only is not None:
        return evaluation
    return evaluation.model_copy(update={"only": tuple(name for name in config.data.suites if name != select.on)})


def selecting_evaluation(config: ExperimentConfig, select: SelectConfig) -> EvaluationConfig:
    """The evaluation that chooses: of one suite, with one decoding."""
    evaluation, name = _evaluation_of(config), decoding_of(config, select)
    decoding, own = evaluation.decodings[name], evaluation.suites.get(select.on)
    if own is not None and decoding.is_greedy:
        own = own.model_copy(update={"num_samples": None})  # has no effect on it, which would be refused
    suites = {select.on: own} if own is not None else {}
    return evaluation.model_copy(update={"only": (select.on,), "decodings": {name: decoding}, "suites": suites})


def _evaluation_of(config: ExperimentConfig) -> EvaluationConfig:
    assert config.evaluation is not None  # every chain that trains is evaluated by a comparison
    return config.evaluation
