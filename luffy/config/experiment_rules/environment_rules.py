"""Rules of `environment`: templates, measures of groups, replayed traces and tasks."""

from luffy.config.data import VerifiersSource
from luffy.config.environment import VerifiersEnvironment, history_of, single_environments
from luffy.config.experiment import ExperimentConfig
from luffy.config.grading import MeasureGrader
from luffy.config.rl_teacher import ServedTeacher


def environment_has_its_template(config: ExperimentConfig) -> None:
    """Turns follow the chat template: no stop texts and no other template."""
    if config.environment is None:
        return
    answering = {"rl": config.rl, "difficulty": config.difficulty, "sample": config.sample}
    for name, section in answering.items():
        if name in config.stages and section is not None and section.stop:
            raise ValueError(
                f"{name}.stop has no effect with an environment, whose turns end with the stop token of the chat "
                "template; remove it"
            )
    evaluation = config.evaluation
    if evaluation is None:
        return
    cut = [name for name, suite in evaluation.suites.items() if suite.stop or suite.template not in (None, "own")]
    if evaluation.stop or evaluation.template != "own" or cut:
        where = "evaluation" if not cut else f"evaluation.suites.{cut[0]}"
        raise ValueError(
            f"{where}: stop and template have no effect with an environment, whose turns follow the chat template; "
            "remove them"
        )


def hints_are_for_single_turns(config: ExperimentConfig) -> None:
    """`objective.group.hint` and `objective.group.anchor` have no environment beside them."""
    if config.environment is None or config.objective is None or "rl" not in config.stages:
        return
    if config.objective.group.hint is not None:
        raise ValueError(
            "objective.group.hint: hints are for responses of a single turn; remove it or the section environment"
        )
    if config.objective.group.anchor is not None:
        raise ValueError(
            "objective.group.anchor: anchors are for responses of a single turn; remove it or the section environment"
        )


def branches_can_be_learned(config: ExperimentConfig) -> None:
    """What RL cannot learn from an episode of several sequences (`history: branching`)."""
    if history_of(config.environment) != "branching" or "rl" not in config.stages or config.objective is None:
        return
    objective, rl = config.objective, config.rl
    whole = [(term.name, term.needs_whole_sequences) for term in objective.terms if term.needs_whole_sequences]
    refused = {
        "objective.advantage.kind: gae": objective.needs_critic,
        "objective.replay": objective.replay is not None,
        "objective.group.prefix": objective.group.prefix is not None,
        "rl.teacher.kind: served": rl is not None and isinstance(rl.teacher, ServedTeacher),
        "rl.correction.level: sequence": (
            rl is not None and rl.correction is not None and rl.correction.level == "sequence"
        ),
        **{f"objective.terms, {name}: {setting}": True for name, setting in whole},
    }
    for setting, is_there in refused.items():
        if is_there:
            raise ValueError(
                f"{setting}: needs an episode as one sequence, and environment.limits.history: branching makes several "
                "of it; choose another, or history: as_sampled"
            )


def group_measures_have_their_groups(config: ExperimentConfig) -> None:
    """Groups are measured in RL, after grading, and not changed afterwards."""
    measures = config.environment.scoring.group_measures if config.environment is not None else {}
    if not measures:
        return
    where = f"environment.scoring.group_measures.{next(iter(measures))}"
    if "rl" not in config.stages or config.objective is None:
        raise ValueError(f"{where}: only RL has groups; remove it, or add the stage rl")
    if config.objective.group.off_policy_when_accuracy_at_most is not None:
        raise ValueError(
            f"{where}: objective.group.off_policy_when_accuracy_at_most changes a group after its episodes are "
            "compared; remove one of the two"
        )
    leaves = [config.grading.kind, *config.grading.named.values()]
    if graded := [kind.name for kind in leaves if isinstance(kind, MeasureGrader) and kind.name in measures]:
        raise ValueError(
            f"grading: kind: measure cannot take {graded[0]}, which is measured of whole groups after grading; use "
            "environment.scoring.weights"
        )


def replays_have_their_environment(config: ExperimentConfig) -> None:
    """Traces are replayed against an environment."""
    if config.data.replay_traces != "off" and (config.environment is None or config.data.train is None):
        missing = "environment" if config.environment is None else "data.train"
        raise ValueError(f"data.replay_traces: {config.data.replay_traces} has no effect without {missing}; remove it")


def tasks_have_their_environment(config: ExperimentConfig) -> None:
    """Tasks that an environment scores come with that environment."""
    named = {f"suites.{name}": source for name, source in config.data.suites.items()} | config.data.training_sources
    for name, source in named.items():
        if not isinstance(source, VerifiersSource) or source.grader != "environment":
            continue
        packages = [each for each in single_environments(config.environment) if isinstance(each, VerifiersEnvironment)]
        if not packages:
            raise ValueError(f"data.{name}: the environment scores its tasks; add environment.kind: verifiers")
        if not any(package.is_same_as(source) for package in packages):
            raise ValueError(
                f"data.{name}: environment, arguments, version and python have to be equal to those of the section "
                "environment"
            )
