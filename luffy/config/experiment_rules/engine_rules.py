"""Rules of rollout engines: which of them a setting reaches, and what they can sample."""

from luffy.config.execution import LOWEST_VLLM_TEMPERATURE
from luffy.config.experiment import ExperimentConfig


def in_process_engine_needs_one_process(config: ExperimentConfig) -> None:
    """`rl.engine: vllm` is for `cluster: local`."""
    if "rl" in config.stages and config.rl is not None and config.rl.engine == "vllm" and config.cluster == "ray":
        raise ValueError(
            "rl.engine: vllm puts an engine into the trainer's process, and cluster: ray has vLLM engines in "
            "processes of their own; remove one of the two settings"
        )


def server_settings_have_an_effect(config: ExperimentConfig) -> None:
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


def several_engines_have_an_effect(config: ExperimentConfig) -> None:
    """Several vLLM engines need a stage that generates by vLLM."""
    number = config.execution.vllm.engines
    # As above, an evaluation outside the chain may use them.
    users = (config.evaluation, config.measured_difficulty, config.sampled_traces)
    if number > 1 and not any(section is not None and section.engine == "vllm" for section in users):
        raise ValueError(
            f"execution.vllm.engines: {number} has no effect without evaluation.engine, difficulty.engine or "
            "sample.engine: vllm; remove it (RL has execution.ray.engines)"
        )


def broadcast_has_receivers(config: ExperimentConfig) -> None:
    """Weights are broadcast to the engines of RL under `cluster: ray`."""
    if config.execution.ray.weight_transfer == "object_store":
        return
    if (
        "rl" not in config.stages
        or config.cluster == "local"
        or (config.rl is not None and config.rl.engine != "cluster")
    ):
        raise ValueError(
            f"execution.ray.weight_transfer: {config.execution.ray.weight_transfer} has no effect without the stage rl "
            "on the engines of cluster: ray; remove it"
        )


def engine_supports_temperatures(config: ExperimentConfig) -> None:
    """vLLM does not sample below a lowest temperature."""
    by_vllm: dict[str, float] = {}
    if "rl" in config.stages and config.rl is not None and (config.cluster == "ray" or config.rl.engine != "cluster"):
        by_vllm["rl.temperature"] = config.rl.temperature
        if config.rl.validation is not None:
            by_vllm["rl.validation.decoding.temperature"] = config.rl.validation.decoding.temperature
    by_engine = "transformers" if config.evaluation is None or config.model.endpoint else config.evaluation.engine
    if "evaluate" in config.stages and config.evaluation is not None and by_engine != "transformers":
        decodings = config.evaluation.decodings.items()
        by_vllm |= {f"evaluation.decodings.{name}.temperature": config.temperature for name, config in decodings}
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
