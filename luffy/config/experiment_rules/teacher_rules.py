"""Rules of `synthesize` and its teachers."""

from luffy.config.experiment import ExperimentConfig


def teachers_are_reached(config: ExperimentConfig) -> None:
    """`execution.teachers` has URLs for exactly those teachers that are endpoints."""
    served = config.synthesize.served if config.synthesize is not None else ()
    unknown = [name for name in config.execution.teachers if name not in served]
    if unknown:
        known = ", ".join(served) or "none"
        raise ValueError(
            f"execution.teachers: {unknown[0]} is no teacher with an endpoint in synthesize.teachers; there are: "
            f"{known}"
        )
    for name in served:
        if name not in config.execution.teachers or not config.execution.teachers[name].urls:
            raise ValueError(f"execution.teachers.{name}.urls: missing; say where the teacher {name} is served")


def synthesis_has_its_prompts(config: ExperimentConfig) -> None:
    """Teachers answer prompts that are not sorted by the traces they come with."""
    if config.synthesize is None or "synthesize" not in config.stages:
        return
    if config.synthesize.rewrite is not None and config.environment is not None:
        raise ValueError(
            "synthesize.rewrite: traces are rewritten in single turns; remove it or the section environment"
        )
    if config.data.filters.difficulty is not None:
        raise ValueError(
            "data.filters.difficulty sorts prompts by the traces that they come with, and synthesize adds others; "
            "remove one"
        )
