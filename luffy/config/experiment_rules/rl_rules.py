"""Rules of an RL step: critic, replay, staleness, correction and the choice of prompts."""

from luffy.config.data import MixtureSource
from luffy.config.draws import CurriculumSampling, PoolSampling
from luffy.config.experiment import ExperimentConfig
from luffy.config.objective import DynamicSampling
from luffy.config.rl_teacher import complaint_about_teacher


def critic_has_an_effect(config: ExperimentConfig) -> None:
    """GAE has a critic, and nothing else has one."""
    if "rl" not in config.stages or config.rl is None or config.objective is None:
        return
    if config.objective.needs_critic and config.rl.critic is None:
        raise ValueError("rl.critic: missing; objective.advantage.kind: gae needs it")
    if config.rl.critic is not None and not config.objective.needs_critic:
        raise ValueError(
            f"rl.critic has no effect with objective.advantage.kind: {config.objective.advantage.kind}; remove it"
        )
    if config.rl.critic is not None and config.rl.critic.warmup_steps >= config.rl.steps:
        raise ValueError(
            f"rl.critic.warmup_steps {config.rl.critic.warmup_steps} leaves none of the {config.rl.steps} RL steps to "
            "the policy; lower it"
        )


def teacher_has_an_effect(config: ExperimentConfig) -> None:
    """`rl.teacher` is there if and only if a loss needs it, and can see what it is shown."""
    if "rl" not in config.stages or config.rl is None or config.objective is None:
        return
    complaint = complaint_about_teacher(
        config.rl.teacher,
        is_needed=config.objective.needs_teacher,
        has_environment=config.environment is not None,
        without_traces=config.data.rl == "complement",
        temperature=config.rl.temperature,
    )
    if complaint is not None:
        raise ValueError(complaint)


def reference_has_an_effect(config: ExperimentConfig) -> None:
    """`rl.reference` needs a KL term against the reference, a refresh before the last step, and no adapter."""
    if "rl" not in config.stages or config.rl is None or config.objective is None or config.rl.reference is None:
        return
    if not config.objective.needs_reference:
        raise ValueError(
            "rl.reference has no effect: objective.terms has none with loss.kind: kl and against: reference; add one "
            "or remove it"
        )
    if config.rl.reference.refresh_every >= config.rl.steps:
        raise ValueError(
            f"rl.reference.refresh_every {config.rl.reference.refresh_every} has no effect in {config.rl.steps} RL "
            "steps: the first refresh would come after the last of them; lower it"
        )
    if config.model.lora is not None:
        raise ValueError(
            "rl.reference: with model.lora the reference is the policy without its adapter, which never moves; remove "
            "one of them"
        )


def old_policy_differs(config: ExperimentConfig) -> None:
    """A KL term against the old policy needs several optimizer steps an RL step."""
    if "rl" not in config.stages or config.rl is None or config.objective is None:
        return
    if config.objective.compares_with_old and config.rl.updates_per_step == 1:
        raise ValueError(
            "a kl term against old has no effect with one optimizer step per RL step, where the old policy is "
            "the current one; lower rl.prompts_per_update or raise rl.passes"
        )


def replay_and_interleaving_have_an_effect(config: ExperimentConfig) -> None:
    """Replay takes at least one prompt a step; interleaved SFT updates a policy that is not frozen."""
    if "rl" not in config.stages or config.rl is None or config.objective is None:
        return
    replay = config.objective.replay
    if replay is not None and round(replay.share * config.rl.prompts_per_step) < 1:
        raise ValueError(
            f"objective.replay.share {replay.share} of {config.rl.prompts_per_step} prompts per step is less than "
            "one prompt; raise it"
        )
    if config.objective.interleaved_sft is not None and config.rl.critic is not None and config.rl.critic.warmup_steps:
        raise ValueError(
            "rl.critic.warmup_steps freezes the policy, which objective.interleaved_sft would update; remove one"
        )


def staleness_needs_separate_engines(config: ExperimentConfig) -> None:
    """Staleness needs engines that generate during updates."""
    if "rl" not in config.stages or config.rl is None or config.rl.max_staleness == 0:
        return
    if config.rl.engine == "openai":
        return
    if config.cluster == "local":
        raise ValueError(
            f"rl.max_staleness {config.rl.max_staleness} has no effect with cluster: local, where rollouts and "
            "updates take turns; set it to 0 or cluster to ray"
        )
    if config.execution.ray.placement == "colocated":
        raise ValueError(
            f"rl.max_staleness {config.rl.max_staleness} needs engines that generate while the trainer updates; with "
            "execution.ray.placement: colocated they share its GPUs in turn; use disaggregated"
        )


def staleness_excludes_dynamic_sampling(config: ExperimentConfig) -> None:
    """With staleness, the prompts of a step are chosen before the previous step ends."""
    if "rl" not in config.stages or config.rl is None or config.objective is None or config.rl.max_staleness == 0:
        return
    if isinstance(config.objective.group.filter, DynamicSampling):
        raise ValueError(
            "objective.group.filter.kind: dynamic_sampling decides during a step how many prompts it takes, so the "
            "next step cannot start early; set rl.max_staleness to 0 or use kind: drop_zero_variance"
        )


def correction_has_a_term(config: ExperimentConfig) -> None:
    """`rl.correction` needs a term on rollouts that is not corrected already."""
    if "rl" not in config.stages or config.rl is None or config.objective is None or config.rl.correction is None:
        return
    if not any(term.lacks_correction for term in config.objective.terms):
        raise ValueError("rl.correction has no effect: no term on rollouts needs it; remove it")


def pools_need_one_source(config: ExperimentConfig) -> None:
    """Pools by pass rate and a mixture of sources both set quotas."""
    if "rl" not in config.stages or config.rl is None or not isinstance(config.rl.sampling, PoolSampling):
        return
    if isinstance(config.data.train, MixtureSource):
        raise ValueError(
            "rl.sampling.kind: pools takes quotas by pass rate, and data.train.kind: mixture by source; use one of them"
        )


def curriculum_has_a_measure(config: ExperimentConfig) -> None:
    """A curriculum by difficulty needs its measurement."""
    if "rl" not in config.stages or config.rl is None or not isinstance(config.rl.sampling, CurriculumSampling):
        return
    if config.rl.sampling.by == "difficulty" and "difficulty" not in config.stages:
        raise ValueError(
            "rl.sampling.by: difficulty sorts by the pass rates that the stage difficulty measures; add the "
            "section difficulty (max_pass_rate: 1.0 keeps all prompts), or use trace_length"
        )


def traces_fit_the_rollouts(config: ExperimentConfig) -> None:
    """No demonstration may be longer than a rollout can be."""
    if "rl" in config.stages and config.rl is not None and config.data.max_trace_tokens > config.rl.max_response_tokens:
        raise ValueError(
            f"data.max_trace_tokens {config.data.max_trace_tokens} is above rl.max_response_tokens "
            f"{config.rl.max_response_tokens}: demonstrations could be longer than any rollout"
        )
