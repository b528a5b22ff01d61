"""What other systems call settings and methods, for who writes one of their names; `docs/coming_from.md` says more."""

from collections.abc import Mapping

_SETTINGS = {
    "objective.group.size": "num_generations n group_size rollouts_per_example n_samples_per_prompt",
    "rl.optimizer.lr, for SFT sft.optimizer.lr": "learning_rate actor_learning_rate",
    "rl.max_response_tokens": "max_completion_length max_response_length max_new_tokens generate_max_len",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "rl.steps": "max_steps total_training_steps",
    "rl.steps, for SFT sft.epochs": "num_train_epochs total_epochs max_epochs num_episodes",
    "rl.prompts_per_step": "train_batch_size rollout_batch_size",
    "rl.prompts_per_update": "ppo_mini_batch_size per_device_train_batch_size gradient_accumulation_steps",
    "rl.passes": "num_iterations ppo_epochs",
    "execution.micro_batch_tokens": "ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size",
    "objective.terms (a term with loss: {kind: kl})": "kl_coef kl_loss_coef init_kl_coef use_kl_loss beta",
    "objective.terms (a term with loss: {kind: entropy})": "entropy_coeff entropy_coef",
    "objective.terms.on_policy.loss": "clip_ratio clip_ratio_low clip_ratio_high epsilon epsilon_high eps_clip",
    "objective.terms.on_policy.normaliser": "loss_type loss_agg_mode",
    "objective.advantage.kind": "adv_estimator advantage_estimator",
    "objective.advantage.scale_by_std": "scale_rewards",
    "objective.advantage.zero_truncated": "mask_truncated_completions overlong_filtering",
    "objective.group.filter": "filter_groups dynamic_filtering",
    "grading.kind": "reward_funcs reward_function custom_reward_function",
    "data.train": "train_files train_dataset dataset_name prompt_data",
    "rl.engine": "use_vllm",
    "rl.max_staleness": "max_async_level",
    "model.lora.rank": "lora_rank lora_r",
    "model.path": "model_name_or_path model_name pretrain",
    "execution.vllm.tensor_parallel_size": "tensor_model_parallel_size vllm_tensor_parallel_size",
}
SETTING_OF: Mapping[str, str] = {name: here for here, names in _SETTINGS.items() for name in names.split()}
"""By the other systems' names."""
METHOD_OF: Mapping[str, str] = {
    "grpo": "on_policy",
    "group_norm": "on_policy",
    "drgrpo": "dr_grpo",
    "dr_grpo_norm": "dr_grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce++": "reinforce_pp",
    "gae": "ppo",
}
