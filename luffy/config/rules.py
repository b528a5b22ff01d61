"""Rules between the sections of an experiment, each of one line, in the order in which mistakes are reported."""

import re
from collections.abc import Iterator
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING

from luffy.config.chain import SECTIONS, broken_chain, views_of
from luffy.config.data import MixtureSource, VerifiersSource
from luffy.config.environment import EnvironmentConfig, VerifiersEnvironment, history_of, single_environments
from luffy.config.evaluation import VALIDATION
from luffy.config.execution import LOWEST_VLLM_TEMPERATURE, VLLM_RANKS
from luffy.config.group import DynamicSampling
from luffy.config.objective import ObjectiveConfig
from luffy.config.stage_kinds import kind_of
from luffy.config.starts import (
    BatchRatio,
    BatchRoot,
    Critique,
    DifficultyDose,
    FitDose,
    LadderDose,
    TracePrefix,
    WholeTrace,
)
from luffy.config.training import CurriculumSampling, PoolSampling, RLConfig, SelfTeacher, ServedTeacher
from luffy.config.yaml_source import not_among

if TYPE_CHECKING:
    from luffy.config.experiment import ExperimentConfig


_SECTION = re.compile(rf"(?:{'|'.join(SECTIONS)})\b[.:]")


def broken_rules(config: "ExperimentConfig") -> Iterator[str]:
    """What is wrong with the chain and between the sections, as each of the stages sees them."""
    yield from broken_chain(config)
    if "difficulty" in config.kinds and "rl" not in config.kinds[config.kinds.index("difficulty") :]:
        yield "stages: difficulty has no effect without rl after it, the only stage that reads its prompts"
    for view in views_of(config):
        for complaint in _of_view(view.config, view.kinds):
            where = f"stages.{view.name}{'.' if _SECTION.match(complaint) else ': '}" if view.name else ""
            yield where + complaint


def _of_view(config: "ExperimentConfig", kinds: frozenset[str]) -> Iterator[str]:
    """What is wrong between the sections for stages of these kinds."""
    yield from _of_sections(config, kinds)
    objective, rl = (config.objective, config.rl) if "rl" in kinds else (None, None)
    yield from _of_teachers(config, kinds, rl)
    if objective is not None and config.data.rl == "complement":
        if "difficulty" in config.kinds:
            yield "data.rl: complement has prompts that the stage difficulty does not measure; remove one of the two"
        group = objective.group
        uses_traces = any(start.shows_trace for start in group.starts.values())
        if uses_traces or objective.interleaved_sft is not None:
            yield (
                "data.rl: complement has prompts without traces, from which the method learns; use train, or a method "
                "that learns from rollouts only (on_policy)"
            )
    if config.environment is not None:
        yield from _of_environment(config, kinds, config.environment, objective, rl)
    yield from _of_tasks(config)
    yield from _of_evaluation(config, kinds)
    if objective is not None and rl is not None:
        yield from _of_models_in_rl(config, objective, rl)
        yield from _of_rl(config, objective, rl)
    yield from _of_engines(config, kinds, rl)
    yield from _of_model(config, kinds, rl)
    if rl is not None and config.data.max_trace_tokens > rl.max_response_tokens:
        yield (
            f"data.max_trace_tokens {config.data.max_trace_tokens} is above rl.max_response_tokens "
            f"{rl.max_response_tokens}: demonstrations could be longer than any rollout"
        )


def _of_sections(config: "ExperimentConfig", kinds: frozenset[str]) -> Iterator[str]:
    """The stages have the sections that they cannot do without."""
    for stage in (stage for stage in config.kinds if stage in kinds):
        for section in kind_of(stage).sections:
            if reduce(getattr, section.split("."), config) is None:
                if section == "objective" and config.method is not None:
                    yield (
                        f"method: {config.method} has no objective, and stage {stage} needs one; "
                        f"choose another method, or a chain without {stage}"
                    )
                preset = "; method=NAME takes that of a preset" if section == "objective" else ""
                yield f"{section}: missing; stage {stage} needs it{preset}"


def _of_teachers(config: "ExperimentConfig", kinds: frozenset[str], rl: RLConfig | None) -> Iterator[str]:
    """Teachers that are endpoints have URLs, and those of `sample` prompts that suit them."""
    teachers = config.sample.teachers if config.sample is not None else {}
    served = [name for name, teacher in teachers.items() if teacher.endpoint is not None]
    is_here = "sample" in kinds or "sample" not in config.kinds
    if unknown := [name for name in config.execution.teachers if name not in served and is_here]:
        yield f"execution.teachers: no teacher of sample.teachers with an endpoint is {not_among(unknown[0], served)}"
    for name in served:
        if name not in config.execution.teachers or not config.execution.teachers[name].urls:
            yield f"execution.teachers.{name}.urls: missing; say where the teacher {name} is served"
    by_name = {} if rl is None else rl.teachers
    scorers = {name: teacher.name for name, teacher in by_name.items() if isinstance(teacher, ServedTeacher)}
    for name, model in scorers.items():
        if name not in config.execution.rl_teachers or not config.execution.rl_teachers[name].urls:
            yield f"execution.rl_teachers.{name}.urls: missing; say where {model} is served (rl.teachers.{name})"
    if rl is not None and (unknown := [name for name in config.execution.rl_teachers if name not in scorers]):
        yield f"execution.rl_teachers: no teacher of rl.teachers with kind: served is {not_among(unknown[0], scorers)}"
    if "difficulty" in kinds and config.difficulty is not None and (probed := config.difficulty.teacher) is not None:
        known = {} if config.rl is None else config.rl.teachers
        if probed not in known:
            yield f"difficulty.teacher: rl.teachers has no {not_among(probed, known)}"
        elif config.probed_teacher is None:
            yield f"difficulty.teacher: {probed} is of kind: {known[probed].kind}; only a kind: model answers prompts"
    if config.teachers and config.sample is not None and config.sample.rewrite and config.environment is not None:
        yield "sample.rewrite: traces are rewritten in single turns; remove it or the section environment"


def _of_environment(
    config: "ExperimentConfig",
    kinds: frozenset[str],
    environment: EnvironmentConfig,
    objective: ObjectiveConfig | None,
    rl: RLConfig | None,
) -> Iterator[str]:
    """Turns follow the chat template, RL can learn from the episodes, and groups are measured in RL, after grading."""
    answering = {"rl": config.rl, "difficulty": config.difficulty, "sample": config.sample}
    for name, section in answering.items():
        if name in kinds and section is not None and section.stop:
            yield (
                f"{name}.stop has no effect with an environment, whose turns end with the stop token of the chat "
                "template; remove it"
            )
    if (evaluation := config.evaluation) is not None:
        cut = [name for name, suite in evaluation.suites.items() if suite.stop or suite.template not in (None, "own")]
        if evaluation.stop or evaluation.template != "own" or cut:
            where = "evaluation" if not cut else f"evaluation.suites.{cut[0]}"
            yield (
                f"{where}: stop and template have no effect with an environment, whose turns follow the chat template; "
                "remove them"
            )
    if objective is not None and rl is not None:
        for name, start in objective.group.starts.items():
            simple = isinstance(start.show, WholeTrace) and start.show.choose == "in_turn"
            if not simple and (start.is_fallback or start.is_in_prompt):
                yield (
                    f"objective.group.starts.{name}: show.kind: {start.show.kind}"
                    f"{' with when.accuracy_at_most' if start.is_fallback else ''} is for responses of a single turn; "
                    "remove it or the section environment"
                )
        whole = [(term.name, term.needs_whole_sequences) for term in objective.terms if term.needs_whole_sequences]
        refused = {
            "objective.advantage.kind: gae": objective.needs_critic,
            "objective.replay": objective.replay is not None,
            **{f"objective.group.starts.{name}": True for name in objective.group.shows(TracePrefix)},
            "rl.teachers, kind: served": any(isinstance(each, ServedTeacher) for each in rl.teachers.values()),
            "rl.correction.level: sequence": rl.correction is not None and rl.correction.level == "sequence",
            **{f"objective.terms, {name}: {setting}": True for name, setting in whole},
        }
        for setting, is_there in refused.items():
            if is_there and history_of(environment) == "branching":
                yield (
                    f"{setting}: needs an episode as one sequence, and environment.limits.history: branching makes "
                    "several of it; choose another, or history: as_sampled"
                )


def _of_tasks(config: "ExperimentConfig") -> Iterator[str]:
    """Tasks that an environment scores come with that environment."""
    packages = [each for each in single_environments(config.environment) if isinstance(each, VerifiersEnvironment)]
    named = {f"suites.{name}": source for name, source in config.data.suites.items()} | config.data.training_sources
    for name, source in named.items():
        if not isinstance(source, VerifiersSource) or source.grader != "environment":
            continue
        if not packages:
            yield f"data.{name}: the environment scores its tasks; add environment.kind: verifiers"
        loaded = attrgetter("environment", "arguments", "version", "python")
        if loaded(source) not in map(loaded, packages):
            yield (
                f"data.{name}: environment, arguments, version and python have to be equal to those of the section "
                "environment"
            )


def _of_evaluation(config: "ExperimentConfig", kinds: frozenset[str]) -> Iterator[str]:
    """Evaluation and validation name suites that exist."""
    if unknown := sorted(set(config.evaluation.suites) - set(config.data.suites)) if config.evaluation else []:
        yield f"evaluation.suites: in data.suites no suite is called {not_among(unknown[0], config.data.suites)}"
    for name, section in {"sft": config.sft, "rl": config.rl}.items():
        if name not in kinds or section is None or section.validation is None:
            continue
        validation, where = section.validation, f"{name}.validation"
        if validation.source is not None and not config.data.validation_prompts:
            yield (
                f"{where}.source: validation is empty; set data.validation_prompts, the number of training prompts "
                "set apart"
            )
        for suite in validation.suites:
            if suite not in config.data.suites:
                yield f"{where}.suites: in data.suites no suite is called {not_among(suite, config.data.suites)}"
    if "sft" in kinds and config.sft is not None and config.sft.validation is not None:
        if config.sft.validation.max_response_tokens is None and config.evaluation is None:
            yield "sft.validation.max_response_tokens: missing; its default is that of evaluation"
        if config.num_ranks > 1 and config.execution.zero_stage == 3:
            yield (
                "sft.validation: ranks that share their weights (execution.zero_stage: 3) cannot generate each on its "
                "own; use zero_stage 1 or 2, or evaluate after training"
            )
    only = config.evaluation.only if config.evaluation is not None else None
    for name in only or ():
        if name == VALIDATION and VALIDATION in config.data.suites:
            yield "evaluation.only: validation is also a suite of data.suites; give that another name"
        if name == VALIDATION and not config.data.validation_prompts:
            yield "evaluation.only: validation has no prompts; set data.validation_prompts"
        if name not in (*config.data.suites, VALIDATION):
            yield (
                f"evaluation.only: no suite is called {name!r}; there are {', '.join(config.data.suites)}, and "
                f"{VALIDATION} with data.validation_prompts"
            )
    if only and len(set(only)) < len(only):
        yield "evaluation.only: names a suite twice"


def _of_models_in_rl(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> Iterator[str]:
    """Critic, teacher and reference are there if and only if they are needed, and can do what they have to."""
    if objective.needs_critic and rl.critic is None:
        yield "rl.critic: missing; objective.advantage.kind: gae needs it"
    if rl.critic is not None and not objective.needs_critic:
        kind = objective.advantage.kind
        yield f"rl.critic has no effect with objective.advantage.kind: {kind}; remove it"
    if rl.critic is not None and rl.critic.warmup_steps >= rl.steps:
        yield (
            f"rl.critic.warmup_steps {rl.critic.warmup_steps} leaves none of the {rl.steps} RL steps to "
            "the policy; lower it"
        )
    yield from _of_scorers(config, objective, rl)
    if rl.reference is not None and not objective.needs_reference:
        yield (
            "rl.reference has no effect: objective.terms has none with loss.kind: kl and against: reference; add one "
            "or remove it"
        )
    for name in rl.following if config.model.lora is not None else ():
        yield f"{name}: with model.lora the copy is the policy without its adapter, which never moves; remove one"


def _of_scorers(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> Iterator[str]:
    """Teachers of RL are there if and only if terms compare with them, can score what they have to, and terms compare
    rows with teachers alone."""
    if not rl.teachers and objective.needs_teacher:
        kinds = "{kind: model, path: FOLDER}, {kind: served, name: MODEL}, or {kind: self}"
        yield f"rl.teachers: missing; a term compares with a teacher: rl.teachers.teacher={kinds}"
    if rl.teachers and not objective.needs_teacher:
        yield (
            "rl.teachers has no effect: no term of objective.terms compares with one (as loss.kind: distillation "
            "does); add one or remove it"
        )
    for name, teacher in rl.teachers.items():
        where = f"rl.teachers.{name}"
        if isinstance(teacher, ServedTeacher):
            alone = "scores sampled tokens alone"
            if rl.temperature != 1.0:
                temperature = f"{rl.temperature:g}; set that to 1"
                yield f"{where}.kind: served scores at temperature 1, not at rl.temperature {temperature}"
            if objective.divergence is not None:
                yield f"{where}.kind: served {alone}; for loss.kind: divergence use kind: model or self"
            if objective.needs_teacher_entropy:
                yield f"{where}.kind: served {alone}; for weigh.teacher_entropy use kind: model or self"
        if isinstance(teacher, SelfTeacher):
            if config.environment is not None:
                yield f"{where}.kind: self shows a solution of a single turn; remove environment, or use kind: model"
            if teacher.shows == "trace" and config.data.rl == "complement":
                yield (
                    f"{where}.kind: self needs traces, and data.rl: complement has prompts without any; use data.rl: "
                    "train"
                )
            if teacher.shows == "start":
                yield from _about_start_teacher(where, objective)
            if teacher.shows == "peer" and objective.group.size == 1:
                yield f"{where}.shows: peer needs other rows in the group; raise objective.group.size"
        starts = objective.group.starts
        asked = () if teacher.rows is None else teacher.rows.start or ()
        if unknown := next((start for start in asked if start not in starts), None):
            yield f"{where}.rows.start: objective.group.starts has no {not_among(unknown, starts)}"
        measured = teacher.rows is not None and teacher.rows.pass_rate_at_least is not None
        if measured and "difficulty" not in config.kinds:
            yield f"{where}.rows.pass_rate_at_least: no stage measures pass rates; add the section difficulty"
    for term in objective.terms:
        taught, at = None if term.gate is None else term.gate.taught, f"objective.terms.{term.name}"
        if not rl.teachers and taught is not None:
            yield f"{at}.gate.taught has no effect without rl.teachers; remove it"
        if isinstance(taught, str) and taught not in rl.teachers:
            yield f"{at}.gate.taught: rl.teachers has no {not_among(taught, rl.teachers)}"
        if rl.teaches_every_row and taught is False:
            yield f"{at}.gate.taught: false never holds: every row has a teacher; remove the term"
        if term.needs_teacher and not rl.teaches_every_row and not taught:
            yield (
                f"{at} compares rows with their teacher, and rl.teachers leaves some without one; set "
                "gate: {taught: true}"
            )


def _about_start_teacher(where: str, objective: ObjectiveConfig) -> Iterator[str]:
    """What is wrong with a teacher that is shown what rows were sampled with."""
    starts = objective.group.starts
    bare = {name: start.show for name, start in starts.items() if start.is_in_prompt and start.learn == "bare"}
    if not bare:
        yield (
            f"{where}.shows: start has no effect: no row is learned without what its prompt showed; add such a start "
            "to objective.group.starts, or show a trace or a peer"
        )
    for name in (name for name, show in bare.items() if isinstance(show, Critique) and "{response}" in show.template):
        yield (
            f"{where}.shows: start needs the prompts of objective.group.starts.{name} again, and the responses in them "
            "are not kept; take {response} out of its template"
        )


def _of_rl(config: "ExperimentConfig", objective: ObjectiveConfig, rl: RLConfig) -> Iterator[str]:
    """Optimizer steps, replay, staleness, engines and the choice of prompts suit the method."""
    if objective.compares_with_old and rl.updates_per_step == 1:
        yield (
            "objective.terms: a kl term against old has no effect with one optimizer step per RL step, where the old "
            "policy is the current one; lower rl.prompts_per_update or raise rl.passes"
        )
    replay = objective.replay
    if replay is not None and round(replay.share * rl.prompts_per_step) < 1:
        yield (
            f"objective.replay.share {replay.share} of {rl.prompts_per_step} prompts per step is less than "
            "one prompt; raise it"
        )
    if objective.interleaved_sft is not None and rl.critic is not None and rl.critic.warmup_steps:
        yield "rl.critic.warmup_steps freezes the policy, which objective.interleaved_sft would update; remove one"
    if rl.max_staleness:
        if config.cluster == "local":
            yield (
                f"rl.max_staleness {rl.max_staleness} has no effect with cluster: local, where rollouts and "
                "updates take turns; set it to 0 or cluster to ray"
            )
        if config.execution.ray.placement == "colocated":
            yield (
                f"rl.max_staleness {rl.max_staleness} needs engines that generate while the trainer updates; with "
                "execution.ray.placement: colocated they share its GPUs in turn; use disaggregated"
            )
    if rl.engine == "vllm" and config.cluster == "ray":
        yield (
            "rl.engine: vllm puts an engine into the trainer's process, and cluster: ray has vLLM engines in "
            "processes of their own; remove one of the two settings"
        )
    if rl.max_staleness and isinstance(objective.group.filter, DynamicSampling):
        yield (
            "objective.group.filter.kind: dynamic_sampling decides during a step how many prompts it takes, so the "
            "next step cannot start early; set rl.max_staleness to 0 or use kind: drop_zero_variance"
        )
    for name, start in objective.group.starts.items():
        if isinstance(start.dose, BatchRatio | BatchRoot) and start.dose.every <= rl.max_staleness:
            yield (
                f"objective.group.starts.{name}.dose.every {start.dose.every} must be above rl.max_staleness "
                f"{rl.max_staleness}: what it does is seen so many steps later"
            )
    if rl.partial_rollout_tokens is not None:
        if config.environment is not None:
            yield (
                "rl.partial_rollout_tokens: an episode cannot wait for the next step; remove it or the section "
                "environment"
            )
        if isinstance(objective.group.filter, DynamicSampling):
            yield (
                "objective.group.filter.kind: dynamic_sampling draws prompts until enough groups vary, and with "
                "rl.partial_rollout_tokens a step does not see all of its groups; use kind: drop_zero_variance"
            )
        for name, start in objective.group.starts.items():
            again = start.is_fallback and not isinstance(start.show, WholeTrace)
            if again or isinstance(start.dose, LadderDose | FitDose | DifficultyDose):
                yield (
                    f"objective.group.starts.{name} samples again, after the rollouts of a group, beyond the tokens "
                    "that rl.partial_rollout_tokens gives an RL step; remove one of the two"
                )
            elif start.is_in_prompt and start.learn == "bare":
                yield (
                    f"objective.group.starts.{name}: with rl.partial_rollout_tokens a row goes on under the prompt "
                    "that it is learned under; set learn: shown, or remove one of the two"
                )
    if rl.correction is not None and not any(term.lacks_correction for term in objective.terms):
        yield "rl.correction has no effect: no term on rollouts needs it; remove it"
    if isinstance(rl.sampling, PoolSampling) and isinstance(config.data.train, MixtureSource):
        yield (
            "rl.sampling.kind: pools takes quotas by pass rate, and data.train.kind: mixture by source; use one of them"
        )
    by_difficulty = isinstance(rl.sampling, CurriculumSampling) and rl.sampling.by == "difficulty"
    if by_difficulty and "difficulty" not in config.kinds:
        yield (
            "rl.sampling.by: difficulty sorts by the pass rates that the stage difficulty measures; add the "
            "section difficulty (max_pass_rate: 1.0 keeps all prompts), or use trace_length"
        )


def _of_engines(config: "ExperimentConfig", kinds: frozenset[str], rl: RLConfig | None) -> Iterator[str]:
    """Servers are given if and only if a section uses them, and vLLM does not sample below a lowest temperature."""
    evaluation = config.evaluation if "evaluate" in kinds else None
    answering = {"difficulty": config.measured_difficulty, "sample": config.sampled_traces}
    sft = config.sft if "sft" in kinds else None
    if sft is not None and sft.engine != "cluster" and sft.validation is None:
        yield f"sft.engine: {sft.engine} has no effect without sft.validation; add it, or remove sft.engine"
    if sft is not None and sft.engine == "vllm" and config.cluster == "ray":
        yield (
            "sft.engine: vllm puts an engine into the trainer's process, and cluster: ray has its ranks in processes "
            "of their own; use cluster, where each rank answers its share"
        )
    ways = config.execution.vllm.tensor_parallel_size
    for name, trained in (("rl", rl), ("sft", sft)):
        if trained is not None and trained.engine == "vllm" and ways > 1:
            yield (
                f"execution.vllm.tensor_parallel_size: {ways} with {name}.engine: vllm, which has the trainer's one "
                "GPU; set it to 1, or use cluster: ray"
            )
    asks_servers = config.evaluation is not None and config.evaluation.engine == "openai"
    if asks_servers and config.model.endpoint is None:
        yield (
            "evaluation.engine: openai asks the servers of model.endpoint, which this experiment lacks; use "
            "transformers or vllm"
        )
    if asks_servers and evaluation is not None and not config.execution.server.urls:
        yield "execution.server.urls: missing; evaluation.engine: openai needs at least one server"
    is_here = "evaluate" in kinds or "evaluate" not in config.kinds
    if config.execution.server.urls and not asks_servers and is_here:
        yield "execution.server.urls has no effect without evaluation.engine: openai"
    by_vllm: dict[str, float] = {}
    if rl is not None and (config.cluster == "ray" or rl.engine != "cluster"):
        by_vllm["rl.temperature"] = rl.temperature
        if rl.validation is not None:
            by_vllm["rl.validation.decoding.temperature"] = rl.validation.decoding.temperature
    if sft is not None and sft.validation is not None and sft.engine != "cluster":
        by_vllm["sft.validation.decoding.temperature"] = sft.validation.decoding.temperature
    if evaluation is not None and config.model.endpoint is None and evaluation.engine != "transformers":
        decodings = evaluation.decodings.items()
        by_vllm |= {f"evaluation.decodings.{name}.temperature": decoding.temperature for name, decoding in decodings}
    for stage, section in answering.items():
        if section is not None and section.temperature is not None and section.engine != "transformers":
            by_vllm[f"{stage}.temperature"] = section.temperature
    for name, temperature in by_vllm.items():
        if 0 < temperature < LOWEST_VLLM_TEMPERATURE:
            yield (
                f"{name} {temperature} is below vLLM's lowest sampling temperature; use 0 (greedy, in evaluation) "
                f"or at least {LOWEST_VLLM_TEMPERATURE}"
            )


def _of_model(config: "ExperimentConfig", kinds: frozenset[str], rl: RLConfig | None) -> Iterator[str]:
    """A base policy has its corpus, an endpoint is only evaluated, an adapter and a number format suit the training."""
    model, execution = config.model, config.execution
    if model.architecture is not None and (config.base is None or config.data.corpus is None):
        yield "model.architecture: a base policy needs base (its training) and data.corpus (its text)"
    if model.architecture is None and (config.base is not None or config.data.corpus is not None):
        origin = next(name for name in ("path", "package", "endpoint") if getattr(model, name) is not None)
        yield f"base and data.corpus have no effect with model.{origin}; remove them"
    if model.endpoint is not None:
        by_policy = {"difficulty", "sft", "rl"} if config.teachers else {"difficulty", "sample", "sft", "rl"}
        if trained := [stage for stage in config.kinds if stage in by_policy and stage in kinds]:
            yield (
                f"stages: {trained[0]} needs a model's weights, which model.endpoint does not give; keep only "
                "prepare_data, base, evaluate and report, or give model.path"
            )
        if config.evaluation is not None and config.evaluation.engine != "openai":
            yield (
                f"evaluation.engine: {config.evaluation.engine} needs weights, which model.endpoint does not give; use "
                "openai"
            )
        for field in sorted({"temperature", "top_p"} & {*model.endpoint.request}):
            for name, decoding in config.evaluation.decodings.items() if config.evaluation is not None else ():
                if (own := getattr(decoding, field)) != 1:
                    yield (
                        f"model.endpoint.request.{field}: null leaves the endpoint at its default of 1, but "
                        f"evaluation.decodings.{name} sets {own}"
                    )
    lora, sft = execution.vllm.separate(model.lora), config.sft if "sft" in kinds else None
    has_engine = config.num_engines > 0 or (sft is not None and sft.engine == "vllm")
    if lora is not None and lora.rank > VLLM_RANKS[-1] and has_engine:
        yield (
            f"model.lora.rank: {lora.rank} is more than vLLM's largest of {VLLM_RANKS[-1]}; lower it, or set "
            "execution.vllm.adapter: merged"
        )
    if model.lora is not None and rl is not None:
        if rl.critic is not None:
            yield (
                "model.lora: rl.critic is a second model trained whole, so an adapter would not save its memory; "
                "choose a method without a critic, or remove model.lora"
            )
        if model.lora.dropout and "sft" not in config.kinds:
            yield (
                "model.lora.dropout has no effect without sft: RL trains without dropout, as its rollouts are "
                "sampled; remove it"
            )
    trains = model.architecture is not None or {"sft", "rl"} & kinds
    if trains and model.dtype == "bfloat16" and execution.zero_stage == 0:
        yield "execution.zero_stage: 0 keeps no float32 master weights for model.dtype: bfloat16; set it to 1, 2 or 3"
    if execution.ranks > 1 and config.cluster == "ray":
        yield f"execution.ranks: {execution.ranks} are of cluster: local; use execution.ray.trainer_ranks, or remove it"
    elif execution.ranks > 1:
        engines = {"rl": config.rl, "sft": config.sft}
        for name in (name for name, section in engines.items() if name in kinds and section is not None):
            if getattr(engines[name], "engine", None) == "vllm":
                yield (
                    f"{name}.engine: vllm lives in the process of a single rank, and execution.ranks is "
                    f"{execution.ranks}; use cluster: ray, or the engine cluster"
                )
        if execution.zero_stage == 3:
            yield (
                f"execution.zero_stage: 3 shares weights among ranks, and each of execution.ranks: {execution.ranks} "
                "generates on its own; use 0, 1 or 2, or cluster: ray"
            )
