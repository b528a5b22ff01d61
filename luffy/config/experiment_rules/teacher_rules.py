"""Rules of teachers: those of `synthesize`, and one of RL that is served."""

from luffy.config.experiment import ExperimentConfig
from luffy.config.rl_teacher import ServedTeacher


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


def rl_teacher_is_reached(config: ExperimentConfig) -> None:
    """`execution.rl_teacher` has URLs if and only if RL's teacher is served."""
    teacher = config.rl.teacher if "rl" in config.stages and config.rl is not None else None
    urls = config.execution.rl_teacher.urls
    if isinstance(teacher, ServedTeacher) and not urls:
        raise ValueError(f"execution.rl_teacher.urls: missing; say where {teacher.name} is served (rl.teacher)")
    if urls and not isinstance(teacher, ServedTeacher):
        raise ValueError("execution.rl_teacher.urls has no effect without rl.teacher.kind: served; remove it")


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
