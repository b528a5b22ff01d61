"""Rules of the model: endpoints, adapters and number formats."""

from luffy.config.experiment import ExperimentConfig


def endpoint_is_only_evaluated(config: ExperimentConfig) -> None:
    """A model served by an endpoint has no local weights and can only be evaluated."""
    endpoint = config.model.endpoint
    if endpoint is None:
        return
    trained = [stage for stage in config.stages if stage in ("difficulty", "sample", "sft", "rl")]
    if trained:
        raise ValueError(
            f"stages: {trained[0]} needs a model's weights, which model.endpoint does not give; keep only "
            "prepare_data, base, evaluate and report, or give model.path"
        )
    if config.evaluation is not None and config.evaluation.engine != "openai":
        raise ValueError(
            f"evaluation.engine: {config.evaluation.engine} needs weights, which model.endpoint does not give; use "
            "openai"
        )


def endpoint_supports_decodings(config: ExperimentConfig) -> None:
    """A request field left to the endpoint is not set by a decoding."""
    endpoint = config.model.endpoint
    if endpoint is None or config.evaluation is None:
        return
    for field in ("temperature", "top_p"):
        others = [name for name, how in config.evaluation.decodings.items() if getattr(how, field) != 1]
        if field in endpoint.request and others:
            raise ValueError(
                f"model.endpoint.request.{field}: null leaves the endpoint at its default of 1, but "
                f"evaluation.decodings.{others[0]} sets {getattr(config.evaluation.decodings[others[0]], field)}"
            )


def adapter_suits_rl(config: ExperimentConfig) -> None:
    """An adapter has no critic beside it, and dropout only in SFT."""
    lora = config.model.lora
    if lora is None or "rl" not in config.stages or config.rl is None:
        return
    if config.rl.critic is not None:
        raise ValueError(
            "model.lora: rl.critic is a second model trained whole, so an adapter would not save its memory; "
            "choose a method without a critic, or remove model.lora"
        )
    if lora.dropout and "sft" not in config.stages:
        raise ValueError(
            "model.lora.dropout has no effect without sft: RL trains without dropout, as its rollouts are sampled; "
            "remove it"
        )


def half_precision_has_master_weights(config: ExperimentConfig) -> None:
    """bfloat16 weights need float32 master weights."""
    if config.model.dtype == "bfloat16" and config.execution.zero_stage == 0:
        raise ValueError(
            "execution.zero_stage: 0 keeps no float32 master weights for model.dtype: bfloat16; set it to 1, 2 or 3"
        )


def ranks_share_sequences(config: ExperimentConfig) -> None:
    """`execution.sequence_parallel` is for the ranks of `cluster: ray`."""
    ways = config.execution.sequence_parallel
    if ways > 1 and config.cluster == "local":
        raise ValueError(
            f"execution.sequence_parallel: {ways} needs as many ranks, and cluster: local trains in one process; use "
            "cluster: ray, or remove it"
        )


def flash_attention_has_its_dtype(config: ExperimentConfig) -> None:
    """Flash attention does not compute in float32."""
    if config.execution.attention.startswith("flash") and config.model.dtype == "float32":
        raise ValueError(
            f"execution.attention: {config.execution.attention} cannot compute in model.dtype: float32; use sdpa, or "
            "model.dtype: bfloat16"
        )
