"""The configuration of a whole experiment: one YAML file in `exp_configs/`."""

import difflib
from typing import Literal

from pydantic import Field, NonNegativeInt, ValidationInfo, field_validator, model_validator

from luffy.config.data import DataConfig, MixtureSource, VerifiersSource
from luffy.config.difficulty import DifficultyConfig
from luffy.config.draws import CurriculumSampling, PoolSampling
from luffy.config.environment import EnvironmentConfig, VerifiersEnvironment
from luffy.config.evaluation import VALIDATION, EvaluationConfig
from luffy.config.execution import LOWEST_VLLM_TEMPERATURE, ExecutionConfig, TrackingConfig
from luffy.config.expert_iteration import ExpertIterationConfig, SampleConfig
from luffy.config.grading import GradingConfig, MeasureGrader
from luffy.config.model import ModelConfig
from luffy.config.objective import DynamicSampling, ObjectiveConfig
from luffy.config.rl_teacher import complaint_about_teacher
from luffy.config.stage_names import StageName
from luffy.config.strict import StrictModel
from luffy.config.synthesis import SynthesizeConfig
from luffy.config.training import BaseConfig, RLConfig, SFTConfig
from luffy.config.validation import ValidationConfig


class ExperimentConfig(StrictModel):
    """The complete configuration of a run."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_.-]*$")
    """Names the runs (`<name>-1`, `<name>-2`, ...)."""
    chain: str | None = None
    """The file in `exp_configs/chains/` that set `stages`; None: the experiment itself."""
    method: str | None = None
    """The file in `exp_configs/methods/` that set `objective`; None: the experiment itself."""
    difficulty: DifficultyConfig | None = None
    """Selects RL's prompts by a policy's pass rates; None: RL uses all of them."""
    synthesize: SynthesizeConfig | None = None
    """Teachers that answer training prompts; None: traces come from `data.train` alone."""
    stages: tuple[StageName, ...]
    """The stages of the chain, in order. The sections `difficulty` and `synthesize` add the stages of these names in
    their places."""
    cluster: Literal["local", "ray"] = "local"
    """Where RL runs: `local` in one process, which trains and generates in turn; `ray` with DeepSpeed ranks and vLLM
    engines as Ray actors, on one machine or many."""
    seed: NonNegativeInt = 0
    data: DataConfig
    model: ModelConfig
    base: BaseConfig | None = None
    sample: SampleConfig | None = None
    expert_iteration: ExpertIterationConfig = ExpertIterationConfig()
    """Rounds of the stages `sample` and `sft`, in a chain that has both."""
    sft: SFTConfig | None = None
    rl: RLConfig | None = None
    objective: ObjectiveConfig | None = None
    evaluation: EvaluationConfig | None = None
    grading: GradingConfig = GradingConfig()
    environment: EnvironmentConfig | None = None
    """Answers the policy between its turns, in RL, `difficulty` and evaluation; None: a response is a single turn."""
    execution: ExecutionConfig = ExecutionConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def num_engines(self) -> int:
        """Engines that `cluster: ray` starts: none without RL, or with `rl.engine: openai`."""
        if "rl" not in self.stages or (self.rl is not None and self.rl.engine == "openai"):
            return 0
        return self.execution.ray.engines

    @property
    def measured_difficulty(self) -> DifficultyConfig | None:
        """The section `difficulty` with its defaults taken from other sections; None: RL uses all prompts."""
        if self.difficulty is None or self.rl is None or "difficulty" not in self.stages:
            return None
        return self.difficulty.spelled_out(self.rl, self.cluster)

    @property
    def measured_policy(self) -> Literal["base", "sft"] | None:
        """The policy whose pass rates select RL's prompts; None: there is no selection."""
        return self.measured_difficulty.policy if self.measured_difficulty is not None else None

    @property
    def sampled_traces(self) -> SampleConfig | None:
        """The section `sample` with its defaults taken from other sections; None: the policy makes no traces."""
        if self.sample is None or "sample" not in self.stages:
            return None
        return self.sample.spelled_out(self.data.max_trace_tokens, self.cluster)

    # Reads `difficulty`, so that field is declared before `stages`.
    @field_validator("stages", mode="after")
    @classmethod
    def _difficulty_by_its_section(cls, stages: tuple[StageName, ...], info: ValidationInfo) -> tuple[StageName, ...]:
        from luffy.config.chain_rules import place_difficulty  # late: it needs this class

        difficulty = info.data.get("difficulty")
        if difficulty is None or stages.count("difficulty") > 1 or not {"base", "rl"} <= set(stages):
            return stages
        added = stages if "difficulty" in stages else place_difficulty((*stages, "difficulty"), "base")
        return place_difficulty(added, difficulty.policy)

    # Reads `synthesize`, so that field is declared before `stages`, too.
    @field_validator("stages", mode="after")
    @classmethod
    def _synthesis_by_its_section(cls, stages: tuple[StageName, ...], info: ValidationInfo) -> tuple[StageName, ...]:
        if info.data.get("synthesize") is None or "synthesize" in stages or not {"sft", "rl"} & {*stages}:
            return stages
        if "base" not in stages:
            return stages  # refused with the chain
        place = stages.index("base") + 1
        return (*stages[:place], "synthesize", *stages[place:])

    @model_validator(mode="after")
    def _chain_makes_sense(self) -> "ExperimentConfig":
        from luffy.config.chain_rules import check_chain  # late: it needs this class

        check_chain(self)
        return self

    @model_validator(mode="after")
    def _difficulty_has_its_policy_and_its_reader(self) -> "ExperimentConfig":
        if "difficulty" in self.stages and "rl" not in self.stages:
            raise ValueError("stages: difficulty has no effect without rl, the only stage that reads its prompts")
        if self.measured_policy == "sft" and "sft" not in self.stages:
            raise ValueError("difficulty.policy: sft needs the stage sft in the chain; use base")
        return self

    @model_validator(mode="after")
    def _teachers_are_reached(self) -> "ExperimentConfig":
        served = self.synthesize.served if self.synthesize is not None else ()
        unknown = [name for name in self.execution.teachers if name not in served]
        if unknown:
            known = ", ".join(served) or "none"
            raise ValueError(
                f"execution.teachers: {unknown[0]} is no teacher with an endpoint in synthesize.teachers; there are: "
                f"{known}"
            )
        for name in served:
            if name not in self.execution.teachers or not self.execution.teachers[name].urls:
                raise ValueError(f"execution.teachers.{name}.urls: missing; say where the teacher {name} is served")
        return self

    @model_validator(mode="after")
    def _synthesis_has_its_prompts(self) -> "ExperimentConfig":
        if self.synthesize is None or "synthesize" not in self.stages:
            return self
        if self.environment is not None:
            raise ValueError("environment: the stage synthesize asks for single turns; remove one of the two sections")
        if self.data.filters.difficulty is not None:
            raise ValueError(
                "data.filters.difficulty sorts prompts by the traces that they come with, and synthesize adds others; "
                "remove one"
            )
        return self

    @model_validator(mode="after")
    def _complement_suits_rl(self) -> "ExperimentConfig":
        if self.data.rl != "complement" or "rl" not in self.stages or self.objective is None:
            return self
        if "difficulty" in self.stages:
            raise ValueError(
                "data.rl: complement are prompts of which the stage difficulty measures none; remove one of the two"
            )
        if self.objective.group.off_policy or self.objective.interleaved_sft is not None:
            raise ValueError(
                "data.rl: complement has prompts without traces, from which the method learns; use train, or a method "
                "on rollouts alone (on_policy)"
            )
        return self

    @model_validator(mode="after")
    def _rounds_sample_and_train(self) -> "ExperimentConfig":
        if self.expert_iteration.rounds > 1 and "sample" in self.stages and "sft" not in self.stages:
            raise ValueError(
                f"expert_iteration.rounds {self.expert_iteration.rounds} has no effect without the stage sft, which "
                "learns from what a round has sampled; set it to 1 or add sft"
            )
        return self

    @model_validator(mode="after")
    def _environment_has_its_template(self) -> "ExperimentConfig":
        if self.environment is None:
            return self
        if "sample" in self.stages:
            raise ValueError(
                "environment: the stage sample answers in single turns; remove the environment or the stage"
            )
        if "rl" in self.stages and self.rl is not None and self.rl.stop:
            raise ValueError(
                "rl.stop has no use with an environment, whose turns end with the stop token of the chat template; "
                "remove it"
            )
        evaluation = self.evaluation
        if evaluation is None:
            return self
        cut = [name for name, suite in evaluation.suites.items() if suite.stop or suite.template not in (None, "own")]
        if evaluation.stop or evaluation.template != "own" or cut:
            where = "evaluation" if not cut else f"evaluation.suites.{cut[0]}"
            raise ValueError(
                f"{where}: stop and template have no use with an environment, whose turns follow the chat template; "
                "remove them"
            )
        return self

    @model_validator(mode="after")
    def _group_measures_have_their_groups(self) -> "ExperimentConfig":
        measures = self.environment.scoring.group_measures if self.environment is not None else {}
        if not measures:
            return self
        where = f"environment.scoring.group_measures.{next(iter(measures))}"
        if "rl" not in self.stages or self.objective is None:
            raise ValueError(f"{where}: only RL has groups; remove it, or add the stage rl")
        if self.objective.group.off_policy_when_accuracy_at_most is not None:
            raise ValueError(
                f"{where}: objective.group.off_policy_when_accuracy_at_most changes a group after its episodes are "
                "compared; remove one of the two"
            )
        leaves = [self.grading.kind, *self.grading.named.values()]
        if graded := [kind.name for kind in leaves if isinstance(kind, MeasureGrader) and kind.name in measures]:
            raise ValueError(
                f"grading: kind: measure cannot take {graded[0]}, which is measured of whole groups after grading; use "
                "environment.scoring.weights"
            )
        return self

    @model_validator(mode="after")
    def _replays_have_their_environment(self) -> "ExperimentConfig":
        if self.data.replay_traces != "off" and (self.environment is None or self.data.train is None):
            missing = "environment" if self.environment is None else "data.train"
            raise ValueError(
                f"data.replay_traces: {self.data.replay_traces} has no effect without {missing}; remove it"
            )
        return self

    @model_validator(mode="after")
    def _tasks_have_their_environment(self) -> "ExperimentConfig":
        named = {f"suites.{name}": source for name, source in self.data.suites.items()} | self.data.training_sources
        for name, source in named.items():
            if not isinstance(source, VerifiersSource) or source.grader != "environment":
                continue
            if not isinstance(self.environment, VerifiersEnvironment):
                raise ValueError(f"data.{name}: the environment scores its tasks; add environment.kind: verifiers")
            if not self.environment.is_same_as(source):
                raise ValueError(
                    f"data.{name}: environment, arguments, version and python have to be equal to those of the section "
                    "environment"
                )
        return self

    @model_validator(mode="after")
    def _evaluated_suites_exist(self) -> "ExperimentConfig":
        unknown = sorted(set(self.evaluation.suites) - set(self.data.suites)) if self.evaluation else []
        if unknown:
            close = difflib.get_close_matches(unknown[0], self.data.suites, n=1, cutoff=0.5)
            raise ValueError(
                f"evaluation.suites: no suite is called {', '.join(unknown)}"
                + (f"; did you mean {close[0]!r}?" if close else "")
                + f"; those of data.suites are {', '.join(self.data.suites)}"
            )
        return self

    @model_validator(mode="after")
    def _validations_can_be_measured(self) -> "ExperimentConfig":
        sections = {"sft": self.sft, "rl": self.rl}
        for name, section in sections.items():
            if name not in self.stages or section is None or section.validation is None:
                continue
            try:
                section.validation.check(section.steps, self.data.validation_prompts, self.data.suites)
            except ValueError as error:
                raise ValueError(f"{name}.validation.{error}") from None
        if "sft" in self.stages and self.sft is not None and self.sft.validation is not None:
            self._check_validation_of_sft(self.sft.validation)
        return self

    def _check_validation_of_sft(self, validation: ValidationConfig) -> None:
        """Raise ValueError where SFT, whose ranks generate themselves, does not know how."""
        if validation.max_response_tokens is None and self.evaluation is None:
            raise ValueError("sft.validation.max_response_tokens: missing; its default is that of evaluation")
        ranks = self.execution.ray.trainer_ranks if self.cluster == "ray" else 1
        if ranks > 1 and self.execution.zero_stage == 3:
            raise ValueError(
                "sft.validation: ranks that share their weights (execution.zero_stage: 3) cannot generate each on its "
                "own; use zero_stage 1 or 2, or evaluate after training"
            )

    @model_validator(mode="after")
    def _only_evaluated_suites_exist(self) -> "ExperimentConfig":
        only = self.evaluation.only if self.evaluation is not None else None
        for name in only or ():
            if name == VALIDATION and VALIDATION in self.data.suites:
                raise ValueError("evaluation.only: validation is also a suite of data.suites; give that another name")
            if name == VALIDATION and not self.data.validation_prompts:
                raise ValueError("evaluation.only: validation has no prompts; set data.validation_prompts")
            if name not in (*self.data.suites, VALIDATION):
                raise ValueError(
                    f"evaluation.only: no suite is called {name!r}; there are {', '.join(self.data.suites)}, and "
                    f"{VALIDATION} with data.validation_prompts"
                )
        if only and len(set(only)) < len(only):
            raise ValueError("evaluation.only: names a suite twice")
        return self

    @model_validator(mode="after")
    def _critic_has_its_use(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None:
            return self
        if self.objective.needs_critic and self.rl.critic is None:
            raise ValueError("rl.critic: missing; objective.advantage.kind: gae needs it")
        if self.rl.critic is not None and not self.objective.needs_critic:
            raise ValueError(
                f"rl.critic has no effect with objective.advantage.kind: {self.objective.advantage.kind}; remove it"
            )
        if self.rl.critic is not None and self.rl.critic.warmup_steps >= self.rl.steps:
            raise ValueError(
                f"rl.critic.warmup_steps {self.rl.critic.warmup_steps} leaves none of the {self.rl.steps} RL steps to "
                "the policy; lower it"
            )
        return self

    @model_validator(mode="after")
    def _teacher_has_its_use(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None:
            return self
        complaint = complaint_about_teacher(
            self.rl.teacher,
            is_needed=self.objective.needs_teacher,
            has_environment=self.environment is not None,
            without_traces=self.data.rl == "complement",
        )
        if complaint is not None:
            raise ValueError(complaint)
        return self

    @model_validator(mode="after")
    def _old_policy_differs(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None:
            return self
        if self.objective.compares_with_old and self.rl.updates_per_step == 1:
            raise ValueError(
                "a kl term against old has no effect with one optimizer step an RL step: the policy is its own old "
                "one; lower rl.prompts_per_update or raise rl.passes"
            )
        return self

    @model_validator(mode="after")
    def _replay_and_interleaving_happen(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None:
            return self
        replay = self.objective.replay
        if replay is not None and round(replay.share * self.rl.prompts_per_step) < 1:
            raise ValueError(
                f"objective.replay.share {replay.share} of {self.rl.prompts_per_step} prompts per step is less than "
                "one prompt; raise it"
            )
        if self.objective.interleaved_sft is not None and self.rl.critic is not None and self.rl.critic.warmup_steps:
            raise ValueError(
                "rl.critic.warmup_steps freezes the policy, which objective.interleaved_sft would update; remove one"
            )
        return self

    @model_validator(mode="after")
    def _staleness_needs_engines_of_their_own(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.rl.max_staleness == 0:
            return self
        if self.rl.engine == "openai":
            return self
        if self.cluster == "local":
            raise ValueError(
                f"rl.max_staleness {self.rl.max_staleness} has no effect with cluster: local, where rollouts and "
                "updates take turns; set it to 0 or cluster to ray"
            )
        if self.execution.ray.placement == "colocated":
            raise ValueError(
                f"rl.max_staleness {self.rl.max_staleness} needs engines that generate while the trainer updates; with "
                "execution.ray.placement: colocated they share its GPUs in turn; use disaggregated"
            )
        return self

    @model_validator(mode="after")
    def _engine_in_the_process_needs_one_process(self) -> "ExperimentConfig":
        if "rl" in self.stages and self.rl is not None and self.rl.engine == "vllm" and self.cluster == "ray":
            raise ValueError(
                "rl.engine: vllm puts an engine into the trainer's process, and cluster: ray has vLLM engines in "
                "processes of their own; remove one of the two settings"
            )
        return self

    @model_validator(mode="after")
    def _steps_know_their_prompts_beforehand(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None or self.rl.max_staleness == 0:
            return self
        if isinstance(self.objective.group.filter, DynamicSampling):
            raise ValueError(
                "objective.group.filter.kind: dynamic_sampling decides during a step how many prompts it takes, so the "
                "next step cannot start early; set rl.max_staleness to 0 or use kind: drop_zero_variance"
            )
        return self

    @model_validator(mode="after")
    def _correction_has_its_term(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or self.objective is None or self.rl.correction is None:
            return self
        if not any(term.lacks_correction for term in self.objective.terms):
            raise ValueError("rl.correction has no effect: no term on rollouts needs it; remove it")
        return self

    @model_validator(mode="after")
    def _pools_are_of_one_source(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or not isinstance(self.rl.sampling, PoolSampling):
            return self
        if isinstance(self.data.train, MixtureSource):
            raise ValueError(
                "rl.sampling.kind: pools takes quotas by pass rate, and data.train.kind: mixture by source; use one "
                "of them"
            )
        return self

    @model_validator(mode="after")
    def _curriculum_has_its_measure(self) -> "ExperimentConfig":
        if "rl" not in self.stages or self.rl is None or not isinstance(self.rl.sampling, CurriculumSampling):
            return self
        if self.rl.sampling.by == "difficulty" and "difficulty" not in self.stages:
            raise ValueError(
                "rl.sampling.by: difficulty sorts by the pass rates that the stage difficulty measures; add the "
                "section difficulty (max_pass_rate: 1.0 keeps all prompts), or use trace_length"
            )
        return self

    @model_validator(mode="after")
    def _servers_have_their_use(self) -> "ExperimentConfig":
        sections = {
            "evaluation": ("evaluate", self.evaluation),
            "difficulty": ("difficulty", self.measured_difficulty),
            "sample": ("sample", self.sampled_traces),
            "rl": ("rl", self.rl),
        }
        users = [
            name
            for name, (stage, section) in sections.items()
            if stage in self.stages and section is not None and section.engine == "openai"
        ]
        if users and not self.execution.server.urls:
            raise ValueError(f"execution.server.urls: missing; {users[0]}.engine: openai needs at least one server")
        # An evaluation outside the chain may use them (flows/evaluate_checkpoint.py).
        by_itself = self.evaluation is not None and self.evaluation.engine == "openai"
        if self.execution.server.urls and not users and not by_itself:
            raise ValueError(
                "execution.server.urls has no effect without evaluation.engine, difficulty.engine, sample.engine or "
                "rl.engine: openai"
            )
        return self

    @model_validator(mode="after")
    def _several_engines_have_their_use(self) -> "ExperimentConfig":
        number = self.execution.vllm.engines
        # As above, an evaluation outside the chain may use them.
        users = (self.evaluation, self.measured_difficulty, self.sampled_traces)
        if number > 1 and not any(section is not None and section.engine == "vllm" for section in users):
            raise ValueError(
                f"execution.vllm.engines: {number} has no effect without evaluation.engine, difficulty.engine or "
                "sample.engine: vllm; remove it (RL has execution.ray.engines)"
            )
        return self

    @model_validator(mode="after")
    def _temperatures_can_be_drawn_at(self) -> "ExperimentConfig":
        by_vllm: dict[str, float] = {}
        if "rl" in self.stages and self.rl is not None and (self.cluster == "ray" or self.rl.engine != "cluster"):
            by_vllm["rl.temperature"] = self.rl.temperature
            if self.rl.validation is not None:
                by_vllm["rl.validation.decoding.temperature"] = self.rl.validation.decoding.temperature
        by_engine = "transformers" if self.evaluation is None or self.model.endpoint else self.evaluation.engine
        if "evaluate" in self.stages and self.evaluation is not None and by_engine != "transformers":
            decodings = self.evaluation.decodings.items()
            by_vllm |= {f"evaluation.decodings.{name}.temperature": config.temperature for name, config in decodings}
        difficulty = self.measured_difficulty
        if difficulty is not None and difficulty.engine != "transformers":
            assert difficulty.temperature is not None
            by_vllm["difficulty.temperature"] = difficulty.temperature
        sampled = self.sampled_traces
        if sampled is not None and sampled.engine != "transformers":
            by_vllm["sample.temperature"] = sampled.temperature
        for name, temperature in by_vllm.items():
            if 0 < temperature < LOWEST_VLLM_TEMPERATURE:
                raise ValueError(
                    f"{name} {temperature} is below vLLM's lowest sampling temperature; use 0 (greedy, in evaluation) "
                    f"or at least {LOWEST_VLLM_TEMPERATURE}"
                )
        return self

    @model_validator(mode="after")
    def _base_has_its_text(self) -> "ExperimentConfig":
        if self.model.architecture is not None and (self.base is None or self.data.corpus is None):
            raise ValueError("a base policy trained from scratch needs base (its training) and data.corpus (its text)")
        if self.model.architecture is None and (self.base is not None or self.data.corpus is not None):
            origin = next(name for name in ("path", "package", "endpoint") if getattr(self.model, name) is not None)
            raise ValueError(f"base and data.corpus have no effect with model.{origin}; remove them")
        return self

    @model_validator(mode="after")
    def _endpoint_is_only_evaluated(self) -> "ExperimentConfig":
        endpoint = self.model.endpoint
        if endpoint is None:
            return self
        trained = [stage for stage in self.stages if stage in ("difficulty", "sample", "sft", "rl")]
        if trained:
            raise ValueError(
                f"stages: {trained[0]} needs a model's weights, which model.endpoint does not give; keep only "
                "prepare_data, base, evaluate and report, or give model.path"
            )
        if self.evaluation is not None and self.evaluation.engine != "openai":
            raise ValueError(
                f"evaluation.engine: {self.evaluation.engine} needs weights, which model.endpoint does not give; use "
                "openai"
            )
        return self

    @model_validator(mode="after")
    def _endpoint_draws_by_the_protocol(self) -> "ExperimentConfig":
        endpoint = self.model.endpoint
        if endpoint is None or self.evaluation is None:
            return self
        for field in ("temperature", "top_p"):
            others = [name for name, how in self.evaluation.decodings.items() if getattr(how, field) != 1]
            if field in endpoint.request and others:
                raise ValueError(
                    f"model.endpoint.request.{field}: null leaves the endpoint at its default of 1, but "
                    f"evaluation.decodings.{others[0]} sets {getattr(self.evaluation.decodings[others[0]], field)}"
                )
        return self

    @model_validator(mode="after")
    def _adapter_suits_rl(self) -> "ExperimentConfig":
        lora = self.model.lora
        if lora is None or "rl" not in self.stages or self.rl is None:
            return self
        if self.rl.critic is not None:
            raise ValueError(
                "model.lora: rl.critic is a second model trained whole, so an adapter would not save its memory; "
                "choose a method without a critic, or remove model.lora"
            )
        if lora.dropout and "sft" not in self.stages:
            raise ValueError(
                "model.lora.dropout has no effect without sft: RL trains without dropout, as its rollouts are sampled; "
                "remove it"
            )
        return self

    @model_validator(mode="after")
    def _half_precision_has_master_weights(self) -> "ExperimentConfig":
        if self.model.dtype == "bfloat16" and self.execution.zero_stage == 0:
            raise ValueError(
                "execution.zero_stage: 0 keeps no float32 master weights for model.dtype: bfloat16; set it to 1, 2 or 3"
            )
        return self

    @model_validator(mode="after")
    def _flash_attention_has_its_dtype(self) -> "ExperimentConfig":
        if self.execution.attention.startswith("flash") and self.model.dtype == "float32":
            raise ValueError(
                f"execution.attention: {self.execution.attention} cannot compute in model.dtype: float32; use sdpa, or "
                "model.dtype: bfloat16"
            )
        return self

    @model_validator(mode="after")
    def _traces_fit_the_rollouts(self) -> "ExperimentConfig":
        if "rl" in self.stages and self.rl is not None and self.data.max_trace_tokens > self.rl.max_response_tokens:
            raise ValueError(
                f"data.max_trace_tokens {self.data.max_trace_tokens} is above rl.max_response_tokens "
                f"{self.rl.max_response_tokens}: demonstrations could be longer than any rollout"
            )
        return self
