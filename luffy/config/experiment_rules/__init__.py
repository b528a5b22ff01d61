"""Rules between the sections of an experiment, by subject. Each raises ValueError with one line."""

from collections.abc import Callable

from luffy.config.experiment import ExperimentConfig
from luffy.config.experiment_rules import (
    chain_rules,
    engine_rules,
    environment_rules,
    evaluation_rules,
    model_rules,
    rl_rules,
    teacher_rules,
)

_RULES: tuple[Callable[[ExperimentConfig], None], ...] = (
    chain_rules.check_chain,
    chain_rules.difficulty_has_its_policy_and_its_reader,
    teacher_rules.teachers_are_reached,
    teacher_rules.rl_teacher_is_reached,
    teacher_rules.synthesis_has_its_prompts,
    chain_rules.complement_suits_rl,
    chain_rules.rounds_sample_and_train,
    environment_rules.environment_has_its_template,
    environment_rules.hints_are_for_single_turns,
    environment_rules.branches_can_be_learned,
    environment_rules.group_measures_have_their_groups,
    environment_rules.replays_have_their_environment,
    environment_rules.tasks_have_their_environment,
    evaluation_rules.evaluated_suites_exist,
    evaluation_rules.validations_can_be_measured,
    evaluation_rules.only_evaluated_suites_exist,
    rl_rules.critic_has_an_effect,
    rl_rules.teacher_has_an_effect,
    rl_rules.reference_has_an_effect,
    rl_rules.old_policy_differs,
    rl_rules.replay_and_interleaving_have_an_effect,
    rl_rules.staleness_needs_separate_engines,
    engine_rules.in_process_engine_needs_one_process,
    rl_rules.staleness_excludes_dynamic_sampling,
    rl_rules.correction_has_a_term,
    rl_rules.pools_need_one_source,
    rl_rules.curriculum_has_a_measure,
    engine_rules.server_settings_have_an_effect,
    engine_rules.several_engines_have_an_effect,
    engine_rules.broadcast_has_receivers,
    engine_rules.engine_supports_temperatures,
    chain_rules.base_has_a_corpus,
    model_rules.endpoint_is_only_evaluated,
    model_rules.endpoint_supports_decodings,
    model_rules.adapter_suits_rl,
    model_rules.half_precision_has_master_weights,
    model_rules.flash_attention_has_its_dtype,
    model_rules.ranks_share_sequences,
    rl_rules.traces_fit_the_rollouts,
)
"""In the order in which their mistakes are reported."""


def check_sections(config: ExperimentConfig) -> None:
    """Raise ValueError for the first rule that the experiment breaks."""
    for rule in _RULES:
        rule(config)
