"""Rules between the sections of an experiment. Each raises ValueError with one line.

They run in the order in which their mistakes are reported, after each section was validated by itself.
"""

import difflib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING

from luffy.config.data import MixtureSource, VerifiersSource
from luffy.config.environment import VerifiersEnvironment, history_of, single_environments
from luffy.config.evaluation import VALIDATION
from luffy.config.execution import LOWEST_VLLM_TEMPERATURE
from luffy.config.grading import MeasureGrader
from luffy.config.group import DynamicSampling
from luffy.config.objective import ObjectiveConfig
from luffy.config.stage_kinds import STAGE_KINDS, STAGE_ORDER
from luffy.config.training import CurriculumSampling, PoolSampling, RLConfig, SelfTeacher, ServedTeacher

if TYPE_CHECKING:
    from luffy.config.experiment import ExperimentConfig

_START = ("prepare_data", "base")
"""What every chain starts with."""


def check_sections(config: "ExperimentConfig") -> None:
    """Raise ValueError for the first rule that the experiment breaks."""
    _check_chain(config)
    objective, rl = (config.objective, config.rl) if "rl" in config.stages else (None, None)
    _check_teachers(config)
    if objective is not None:
        _check_complement(config, objective)
    if config.expert_iteration.rounds > 1 and "sample" in config.stages and "sft" not in config.stages:
        raise ValueError(
            f"expert_iteration.rounds {config.expert_iteration.rounds} has no effect without the stage sft, which "
            "learns from what a round has sampled; set it to 1 or add sft"
        )
    if config.environment is not None:
        _check_turns(config)
    if objective is not None and rl is not None:
        _check_episodes_of_rl(config, objective, rl)
    _check_group_measures(config, objective)
    _check_tasks(config)
    _check_evaluation(config)
    if objective is not None and rl is not None:
        _check_rl(config, objective, rl)
    _check_servers(config)
    _check_temperatures(config)
    _check_model(config)
    if rl is not None and config.data.max_trace_tokens > rl.max_response_tokens:
        raise ValueError(
            f"data.max_trace_tokens {config.data.max_trace_tokens} is above rl.max_response_tokens "
            f"{rl.max_response_tokens}: demonstrations could be longer than any rollout"
        )


def place_difficulty(stages: Sequence[str], policy: str | None) -> tuple[str, ...]:
    """The stages with `difficulty`, if they have it, directly after the one whose policy it measures."""
    others = [stage for stage in stages if stage != "difficulty"]
    if "difficulty" not in stages or policy not in others:
        return tuple(stages)
    place = others.index(policy) + 1
    return (*others[:place], "difficulty", *others[place:])


def _check_chain(config: "ExperimentConfig") -> None:
    """Stages are in order, and have what they read and their sections."""
    policy = config.difficulty.policy if config.difficulty is not None else None
    expected = place_difficulty([stage for stage in STAGE_ORDER if stage in config.stages], policy)
    if config.stages != expected:
        raise ValueError(f"stages: must be in the order {', '.join(expected)}, each once")
    missing = [stage for stage in _START if stage not in config.stages]
    if missing:
        raise ValueError(f"stages: {', '.join(missing)} missing; every chain starts with {', '.join(_START)}")
    provided = set[str]()
    for stage in config.stages:
        kind = STAGE_KINDS[stage]
        for role in (*kind.inputs.values(), *kind.requires):
            if role not in provided:
                maker = next(name for name in STAGE_ORDER if role in STAGE_KINDS[name].provides)
                raise ValueError(f"stages: {stage} needs {maker} before it")
        provided.update(kind.provides)
    for stage in config.stages:
        for section in STAGE_KINDS[stage].sections:
            if reduce(getattr, section.split("."), config) is None:
                if section == "objective" and config.method is not None:
                    raise ValueError(
                        f"method: {config.method} has no objective, and stage {stage} needs one; "
                        f"choose another method, or a chain without {stage}"
                    )
                preset = "; method=NAME takes that of a preset" if section == "objective" else ""
                raise ValueError(f"{section}: missing; stage {stage} needs it{preset}")
    if "difficulty" in config.stages and "rl" not in config.stages:
        raise ValueError("stages: difficulty has no effect without rl, the only stage that reads its prompts")
    if config.measured_policy == "sft" and "sft" not in config.stages:
        raise ValueError("difficulty.policy: sft needs the stage sft in the chain; use base")


def _check_teachers(config: "ExperimentConfig") -> None:
    """Teachers that are endpoints have URLs, and those of `synthesize` prompts that suit them."""
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
    teacher = config.rl.teacher if "rl" in config.stages and config.rl is not None else None
    if isinstance(teacher, ServedTeacher) and not config.execution.rl_teacher.urls:
        raise ValueError(f"execution.rl_teacher.urls: missing; say where {teacher.name} is served (rl.teacher)")
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


def _check_complement(config: "ExperimentConfig", objective: ObjectiveConfig) -> None:
    """`data.rl: complement` has no traces and no measured difficulty."""
    if config.data.rl != "complement":
        return
    if "difficulty" in config.stages:
        raise ValueError(
            "data.rl: complement has prompts that the stage difficulty does not measure; remove one of the two"
        )
    group = objective.group
    uses_traces = group.off_policy > 0 or group.hint is not None or group.anchor is not None
    if uses_traces or objective.interleaved_sft is not None:
        raise ValueError(
            "data.rl: complement has prompts without traces, from which the method learns; use train, or a method "
            "that learns from rollouts only (on_policy)"
        )


def _check_turns(config: "ExperimentConfig") -> None:
    """Turns of an environment follow the chat template: no stop texts and no other template."""
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


def _check_episodes_of_rl(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> None:
    """What RL can learn from episodes of several turns, and of several sequences (`history: branching`)."""
    if config.environment is None:
        return
    if objective.group.hint is not None:
        raise ValueError(
            "objective.group.hint: hints are for responses of a single turn; remove it or the section environment"
        )
    if objective.group.anchor is not None:
        raise ValueError(
            "objective.group.anchor: anchors are for responses of a single turn; remove it or the section environment"
        )
    if history_of(config.environment) != "branching":
        return
    whole = [(term.name, term.needs_whole_sequences) for term in objective.terms if term.needs_whole_sequences]
    refused = {
        "objective.advantage.kind: gae": objective.needs_critic,
        "objective.replay": objective.replay is not None,
        "objective.group.prefix": objective.group.prefix is not None,
        "rl.teacher.kind: served": isinstance(rl.teacher, ServedTeacher),
        "rl.correction.level: sequence": rl.correction is not None and rl.correction.level == "sequence",
        **{f"objective.terms, {name}: {setting}": True for name, setting in whole},
    }
    for setting, is_there in refused.items():
        if is_there:
            raise ValueError(
                f"{setting}: needs an episode as one sequence, and environment.limits.history: branching makes several "
                "of it; choose another, or history: as_sampled"
            )


def _check_group_measures(config: "ExperimentConfig", objective: ObjectiveConfig | None) -> None:
    """Groups are measured in RL, after grading, and not changed afterwards."""
    measures = config.environment.scoring.group_measures if config.environment is not None else {}
    if not measures:
        return
    where = f"environment.scoring.group_measures.{next(iter(measures))}"
    if objective is None:
        raise ValueError(f"{where}: only RL has groups; remove it, or add the stage rl")
    if objective.group.off_policy_when_accuracy_at_most is not None:
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


def _check_tasks(config: "ExperimentConfig") -> None:
    """Traces that are replayed, and tasks that an environment scores, come with that environment."""
    if config.data.replay_traces != "off" and (config.environment is None or config.data.train is None):
        missing = "environment" if config.environment is None else "data.train"
        raise ValueError(f"data.replay_traces: {config.data.replay_traces} has no effect without {missing}; remove it")
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


def _check_evaluation(config: "ExperimentConfig") -> None:
    """Evaluation and validation name suites that exist, and a validation happens within the stage's steps."""
    unknown = sorted(set(config.evaluation.suites) - set(config.data.suites)) if config.evaluation else []
    if unknown:
        close = difflib.get_close_matches(unknown[0], config.data.suites, n=1, cutoff=0.5)
        raise ValueError(
            f"evaluation.suites: no suite is called {', '.join(unknown)}"
            + (f"; did you mean {close[0]!r}?" if close else "")
            + f"; those of data.suites are {', '.join(config.data.suites)}"
        )
    for name, section in {"sft": config.sft, "rl": config.rl}.items():
        if name not in config.stages or section is None or section.validation is None:
            continue
        try:
            section.validation.check(section.steps, config.data.validation_prompts, config.data.suites)
        except ValueError as error:
            raise ValueError(f"{name}.validation.{error}") from None
    if "sft" in config.stages and config.sft is not None and config.sft.validation is not None:
        if config.sft.validation.max_response_tokens is None and config.evaluation is None:
            raise ValueError("sft.validation.max_response_tokens: missing; its default is that of evaluation")
        ranks = config.execution.ray.trainer_ranks if config.cluster == "ray" else 1
        if ranks > 1 and config.execution.zero_stage == 3:
            raise ValueError(
                "sft.validation: ranks that share their weights (execution.zero_stage: 3) cannot generate each on its "
                "own; use zero_stage 1 or 2, or evaluate after training"
            )
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


def _check_rl(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> None:
    """Every part of an RL step has its counterpart: critic, teacher, reference, replay, engines, choice of prompts."""
    _check_critic(objective, rl)
    _check_rl_teacher(config, objective, rl)
    _check_reference(config, objective, rl)
    if objective.compares_with_old and rl.updates_per_step == 1:
        raise ValueError(
            "a kl term against old has no effect with one optimizer step per RL step, where the old policy is "
            "the current one; lower rl.prompts_per_update or raise rl.passes"
        )
    replay = objective.replay
    if replay is not None and round(replay.share * rl.prompts_per_step) < 1:
        raise ValueError(
            f"objective.replay.share {replay.share} of {rl.prompts_per_step} prompts per step is less than "
            "one prompt; raise it"
        )
    if objective.interleaved_sft is not None and rl.critic is not None and rl.critic.warmup_steps:
        raise ValueError(
            "rl.critic.warmup_steps freezes the policy, which objective.interleaved_sft would update; remove one"
        )
    _check_engine_of_rl(config, objective, rl)
    if rl.correction is not None and not any(term.lacks_correction for term in objective.terms):
        raise ValueError("rl.correction has no effect: no term on rollouts needs it; remove it")
    if isinstance(rl.sampling, PoolSampling) and isinstance(config.data.train, MixtureSource):
        raise ValueError(
            "rl.sampling.kind: pools takes quotas by pass rate, and data.train.kind: mixture by source; use one of them"
        )
    by_difficulty = isinstance(rl.sampling, CurriculumSampling) and rl.sampling.by == "difficulty"
    if by_difficulty and "difficulty" not in config.stages:
        raise ValueError(
            "rl.sampling.by: difficulty sorts by the pass rates that the stage difficulty measures; add the "
            "section difficulty (max_pass_rate: 1.0 keeps all prompts), or use trace_length"
        )


def _check_critic(objective: ObjectiveConfig, rl: RLConfig) -> None:
    """GAE has a critic, and nothing else has one."""
    if objective.needs_critic and rl.critic is None:
        raise ValueError("rl.critic: missing; objective.advantage.kind: gae needs it")
    if rl.critic is not None and not objective.needs_critic:
        kind = objective.advantage.kind
        raise ValueError(f"rl.critic has no effect with objective.advantage.kind: {kind}; remove it")
    if rl.critic is not None and rl.critic.warmup_steps >= rl.steps:
        raise ValueError(
            f"rl.critic.warmup_steps {rl.critic.warmup_steps} leaves none of the {rl.steps} RL steps to "
            "the policy; lower it"
        )


def _check_rl_teacher(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> None:
    """`rl.teacher` is there if and only if a loss needs it, and can see what it is shown."""
    teacher = rl.teacher
    if teacher is None:
        if objective.needs_teacher:
            wanted = "rl.teacher={kind: model, path: FOLDER}, {kind: served, name: MODEL}, or {kind: self}"
            raise ValueError(f"rl.teacher: missing; a distillation term needs it: {wanted}")
        return
    if not objective.needs_teacher:
        raise ValueError(
            "rl.teacher has no effect: objective.terms has none with loss.kind: distillation; add one or remove it"
        )
    if isinstance(teacher, ServedTeacher) and rl.temperature != 1.0:
        raise ValueError(
            f"rl.teacher.kind: served scores at temperature 1, not at rl.temperature {rl.temperature:g}; set that to 1"
        )
    if isinstance(teacher, SelfTeacher) and config.environment is not None:
        raise ValueError("rl.teacher.kind: self shows a trace of a single turn; remove environment, or use kind: model")
    if isinstance(teacher, SelfTeacher) and config.data.rl == "complement":
        raise ValueError(
            "rl.teacher.kind: self needs traces, and data.rl: complement has prompts without any; use data.rl: train"
        )


def _check_reference(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> None:
    """`rl.reference` needs a KL term against the reference, a refresh before the last step, and no adapter."""
    if rl.reference is None:
        return
    if not objective.needs_reference:
        raise ValueError(
            "rl.reference has no effect: objective.terms has none with loss.kind: kl and against: reference; add one "
            "or remove it"
        )
    if rl.reference.refresh_every >= rl.steps:
        raise ValueError(
            f"rl.reference.refresh_every {rl.reference.refresh_every} has no effect in {rl.steps} RL "
            "steps: the first refresh would come after the last of them; lower it"
        )
    if config.model.lora is not None:
        raise ValueError(
            "rl.reference: with model.lora the reference is the policy without its adapter, which never moves; remove "
            "one of them"
        )


def _check_engine_of_rl(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> None:
    """Staleness needs engines that generate during updates, and `rl.engine: vllm` is for `cluster: local`."""
    if rl.max_staleness and rl.engine != "openai":
        if config.cluster == "local":
            raise ValueError(
                f"rl.max_staleness {rl.max_staleness} has no effect with cluster: local, where rollouts and "
                "updates take turns; set it to 0 or cluster to ray"
            )
        if config.execution.ray.placement == "colocated":
            raise ValueError(
                f"rl.max_staleness {rl.max_staleness} needs engines that generate while the trainer updates; with "
                "execution.ray.placement: colocated they share its GPUs in turn; use disaggregated"
            )
    if rl.engine == "vllm" and config.cluster == "ray":
        raise ValueError(
            "rl.engine: vllm puts an engine into the trainer's process, and cluster: ray has vLLM engines in "
            "processes of their own; remove one of the two settings"
        )
    if rl.max_staleness and isinstance(objective.group.filter, DynamicSampling):
        raise ValueError(
            "objective.group.filter.kind: dynamic_sampling decides during a step how many prompts it takes, so the "
            "next step cannot start early; set rl.max_staleness to 0 or use kind: drop_zero_variance"
        )


def _check_servers(config: "ExperimentConfig") -> None:
    """Servers are given if and only if a section uses them."""
    sections = {
        "evaluation": ("evaluate", config.evaluation),
        "difficulty": ("difficulty", config.measured_difficulty),
        "sample": ("sample", config.sampled_traces),
        "rl": ("rl", config.rl),
    }
    users = [
        name
        for name, (stage, section) in sections.items()
        if stage in config.stages and section is not None and section.engine == "openai"
    ]
    if users and not config.execution.server.urls:
        raise ValueError(f"execution.server.urls: missing; {users[0]}.engine: openai needs at least one server")
    # An evaluation outside the chain may use them (flows/evaluate_checkpoint.py).
    by_itself = config.evaluation is not None and config.evaluation.engine == "openai"
    if config.execution.server.urls and not users and not by_itself:
        raise ValueError(
            "execution.server.urls has no effect without evaluation.engine, difficulty.engine, sample.engine or "
            "rl.engine: openai"
        )


def _check_temperatures(config: "ExperimentConfig") -> None:
    """vLLM does not sample below a lowest temperature."""
    by_vllm: dict[str, float] = {}
    if "rl" in config.stages and config.rl is not None and (config.cluster == "ray" or config.rl.engine != "cluster"):
        by_vllm["rl.temperature"] = config.rl.temperature
        if config.rl.validation is not None:
            by_vllm["rl.validation.decoding.temperature"] = config.rl.validation.decoding.temperature
    by_engine = "transformers" if config.evaluation is None or config.model.endpoint else config.evaluation.engine
    if "evaluate" in config.stages and config.evaluation is not None and by_engine != "transformers":
        decodings = config.evaluation.decodings.items()
        by_vllm |= {f"evaluation.decodings.{name}.temperature": decoding.temperature for name, decoding in decodings}
    difficulty = config.measured_difficulty
    if difficulty is not None and difficulty.engine != "transformers":
        assert difficulty.temperature is not None
        by_vllm["difficulty.temperature"] = difficulty.temperature
    sampled = config.sampled_traces
    if sampled is not None and sampled.engine != "transformers":
        by_vllm["sample.temperature"] = sampled.temperature
    for name, temperature in by_vllm.items():
        if 0 < temperature < LOWEST_VLLM_TEMPERATURE:
            raise ValueError(
                f"{name} {temperature} is below vLLM's lowest sampling temperature; use 0 (greedy, in evaluation) "
                f"or at least {LOWEST_VLLM_TEMPERATURE}"
            )


def _check_model(config: "ExperimentConfig") -> None:
    """A base policy has its corpus, an endpoint is only evaluated, an adapter and a number format suit the training."""
    model, execution = config.model, config.execution
    if model.architecture is not None and (config.base is None or config.data.corpus is None):
        raise ValueError("a base policy trained from scratch needs base (its training) and data.corpus (its text)")
    if model.architecture is None and (config.base is not None or config.data.corpus is not None):
        origin = next(name for name in ("path", "package", "endpoint") if getattr(model, name) is not None)
        raise ValueError(f"base and data.corpus have no effect with model.{origin}; remove them")
    if model.endpoint is not None:
        _check_endpoint(config, model.endpoint.request)
    if model.lora is not None and "rl" in config.stages and config.rl is not None:
        if config.rl.critic is not None:
            raise ValueError(
                "model.lora: rl.critic is a second model trained whole, so an adapter would not save its memory; "
                "choose a method without a critic, or remove model.lora"
            )
        if model.lora.dropout and "sft" not in config.stages:
            raise ValueError(
                "model.lora.dropout has no effect without sft: RL trains without dropout, as its rollouts are "
                "sampled; remove it"
            )
    if model.dtype == "bfloat16" and execution.zero_stage == 0:
        raise ValueError(
            "execution.zero_stage: 0 keeps no float32 master weights for model.dtype: bfloat16; set it to 1, 2 or 3"
        )
    if execution.attention.startswith("flash") and model.dtype == "float32":
        raise ValueError(
            f"execution.attention: {execution.attention} cannot compute in model.dtype: float32; use sdpa, or "
            "model.dtype: bfloat16"
        )
    if execution.sequence_parallel > 1 and config.cluster == "local":
        raise ValueError(
            f"execution.sequence_parallel: {execution.sequence_parallel} needs as many ranks, and cluster: local "
            "trains in one process; use cluster: ray, or remove it"
        )


def _check_endpoint(config: "ExperimentConfig", request: Mapping[str, object]) -> None:
    """A model served by an endpoint has no weights, and a field left to the endpoint is not set by a decoding."""
    trained = [stage for stage in config.stages if stage in ("difficulty", "sample", "sft", "rl")]
    if trained:
        raise ValueError(
            f"stages: {trained[0]} needs a model's weights, which model.endpoint does not give; keep only "
            "prepare_data, base, evaluate and report, or give model.path"
        )
    if config.evaluation is None:
        return
    if config.evaluation.engine != "openai":
        raise ValueError(
            f"evaluation.engine: {config.evaluation.engine} needs weights, which model.endpoint does not give; use "
            "openai"
        )
    for field in ("temperature", "top_p"):
        others = [name for name, how in config.evaluation.decodings.items() if getattr(how, field) != 1]
        if field in request and others:
            raise ValueError(
                f"model.endpoint.request.{field}: null leaves the endpoint at its default of 1, but "
                f"evaluation.decodings.{others[0]} sets {getattr(config.evaluation.decodings[others[0]], field)}"
            )
