"""Names that users write: the nearest one to a slip, and what other frameworks call the same thing."""

import difflib
from collections.abc import Iterable, Mapping


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Return the option that `name` was most likely meant to be, or None."""
    known = {_plain(option): option for option in options}
    close = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.6)
    return known[close[0]] if close else None


def hint(name: str, options: Iterable[str], what: str = "allowed") -> str:
    """Return how a message about an unknown name ends: the nearest option, or all of them."""
    options = list(options)
    near = nearest(name, options)
    if near is not None:
        return f" - did you mean {near!r}?"
    return f"; {what}: {', '.join(options)}" if options else ""


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def foreign(name: str) -> tuple[str, ...]:
    """Return what a key of another framework is called here, for example `num_generations`; () if unknown."""
    return _FOREIGN.get(_plain(name), ())


# Left: our path. Right: names in TRL, verl, OpenRLHF, slime, AReaL, NeMo-RL, SkyRL, prime-rl and Hugging Face.
_SAME: Mapping[tuple[str, ...], str] = {
    ("model.path",): "model_name_or_path model_path model_name pretrained_model_name_or_path pretrain hf_checkpoint"
    " model_id actor_model base_model",
    ("model.tokenizer",): "tokenizer_path tokenizer_name tokenizer_name_or_path",
    ("model.dtype",): "torch_dtype precision bf16 fp32 param_dtype",
    ("data.source",): "dataset dataset_name dataset_path train_dataset train_files train_file prompt_data data_path"
    " train_data",
    ("data.max_prompt_tokens",): "max_prompt_length max_prompt_len prompt_max_len prompt_length rollout_max_prompt_len"
    " max_input_len max_input_length",
    ("data.prompt",): "prompt_key input_key prompt_template input_template",
    ("data.answer",): "label_key answer_key target_key",
    ("data.size",): "max_samples max_examples num_samples train_max_samples",
    ("rollout.max_response_tokens",): "max_completion_length max_completion_len max_new_tokens max_tokens"
    " response_length max_response_length max_response_len rollout_max_response_len generate_max_len max_gen_len",
    ("rollout.backend",): "inference_engine inference_backend rollout_backend use_vllm generation_backend",
    ("rollout.replicas",): "num_engines num_inference_engines rollout_num_engines vllm_num_engines",
    ("rollout.temperature",): "rollout_temperature sampling_temperature",
    ("rollout.top_p",): "rollout_top_p",
    ("rollout.top_k",): "rollout_top_k",
    ("rollout.max_inflight",): "max_num_seqs max_concurrency max_concurrent_requests max_concurrent_rollouts"
    " concurrency max_running_requests",
    ("rollout.stop",): "stop_strings stop_words stop_sequences rollout_stop",
    ("reward.fn",): "reward_funcs reward_func reward_fn reward_function reward_fn_path custom_rm_path rm_path rm_type"
    " custom_reward_function remote_rm_url",
    ("reward.timeout",): "reward_timeout timeout_s timeout_seconds",
    ("train.algorithm",): "adv_estimator advantage_estimator",
    ("train.group_size",): "num_generations n n_samples num_samples_per_prompt n_samples_per_prompt samples_per_prompt"
    " rollout_n num_return_sequences rollouts_per_example rollouts_per_prompt num_generations_per_prompt group_n"
    " num_rollouts_per_prompt",
    ("train.prompts_per_step",): "train_batch_size rollout_batch_size num_prompts_per_step prompts_per_batch",
    ("train.rows_per_step",): "global_batch_size train_global_batch_size generation_batch_size",
    ("train.steps",): "max_steps num_rollout num_steps total_training_steps num_train_steps train_iters",
    ("train.lr",): "learning_rate actor_lr actor_learning_rate policy_lr",
    ("train.schedule",): "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule scheduler",
    ("train.lr_warmup",): "lr_warmup_steps warmup_steps num_warmup_steps lr_warmup_iters",
    ("train.betas",): "adam_beta1 adam_beta2 adam_betas beta1 beta2",
    ("train.eps",): "adam_epsilon adam_eps",
    ("train.max_grad_norm",): "grad_clip clip_grad grad_clip_norm gradient_clipping max_norm",
    ("train.token_budget",): "max_tokens_per_gpu ppo_max_token_len_per_gpu max_tokens_per_mb micro_batch_size"
    " ppo_micro_batch_size_per_gpu per_device_train_batch_size micro_train_batch_size train_micro_batch_size",
    ("train.packing",): "use_remove_padding remove_padding use_padding_free padding_free pack_sequences packing_samples"
    " sequence_packing use_sequence_packing",
    ("train.clip_low", "train.clip_high"): "epsilon eps_clip clip_ratio clip_eps cliprange clip_range ratio_clip",
    ("train.clip_low",): "epsilon_low eps_clip_low clip_ratio_low clip_ratio_min ratio_clip_min",
    ("train.clip_high",): "epsilon_high eps_clip_high clip_ratio_high clip_ratio_max eps_clip_higher ratio_clip_max",
    ("train.kl_coef",): "kl_beta beta kl_loss_coef init_kl_coef kl_ctl kl_penalty_coef kl_loss_weight"
    " reference_policy_kl_penalty use_kl_loss",
    ("train.kl",): "kl_estimator kl_loss_type kl_type kl_penalty",
    ("train.entropy_coef",): "entropy_coeff entropy_loss_coef ent_coef entropy_bonus",
    ("train.aggregate",): "loss_type loss_agg_mode loss_aggregation reduction",
    ("critic.path",): "critic_model critic_model_path critic_pretrain value_model",
    ("critic.lr",): "critic_lr critic_learning_rate value_lr",
    ("critic.clip",): "cliprange_value value_clip critic_clip vf_clip clip_range_vf",
    ("critic.warmup",): "critic_warmup num_critic_only_steps critic_warmup_steps",
    ("eval.source",): "eval_dataset val_files eval_prompt_data val_data test_files eval_data",
    ("eval.every",): "eval_steps test_freq eval_interval val_period eval_freq",
    ("eval.samples",): "n_samples_per_eval_prompt num_generations_eval",
    ("output.folder",): "output_dir save_dir save_path save default_local_dir checkpoint_dir logging_dir run_dir",
    ("output.checkpoint_every",): "save_steps save_freq save_interval save_period ckpt_interval",
    ("output.keep_checkpoints",): "save_total_limit max_ckpt_num max_ckpt_to_keep keep_last",
}
_FOREIGN = {name: paths for paths, names in _SAME.items() for name in names.split()}
