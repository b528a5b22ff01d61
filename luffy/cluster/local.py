"""`cluster: local`: one process, in which trainer and engine run in turn.

The embedded engine generates with the very model in training. A vLLM engine (`rl.engine: vllm`) has a copy of its
weights, which every `publish` replaces.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from luffy.cluster.servers import Servers
from luffy.errors import ConfigError
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.rollout.vllm_engine import VLLMEngine
from luffy.rollout.vllm_limits import check_installed
from luffy.training.learner import Trainer, TrainerRank, TrainerSpec
from luffy.training.policy import Policy
from luffy.training.rank_calls import LocalRanks


class EmbeddedEngine:
    """Generates with the current weights of the policy in training; finds stop texts with the tokenizer in `folder`."""

    def __init__(self, policy: Policy, batch_size: int, folder: Path) -> None:
        self._policy = policy
        self._batch_size = batch_size
        self._folder = folder
        self.weight_version = 0

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion per request, in order."""
        with self._policy.inference_model() as model:
            engine = TransformersEngine(model, self._batch_size, self.weight_version, self._folder)
            return engine.generate(requests, params)

    def close(self) -> None:
        """Nothing to free: the policy belongs to the trainer."""


class LocalCluster:
    """One trainer rank in this process, with the engine that `rl.engine` names.

    A resumed run generates the steps that are not in the journal again, from the same requests and weights. The
    embedded engine then samples the same tokens. So does vLLM on the same machine with the same number of threads and
    the same `execution.vllm`: it schedules a call's requests in the same way and reuses nothing of earlier calls.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        self._servers = Servers(spec) if spec.settings.rl.engine == "openai" else None
        if spec.settings.rl.engine == "vllm":
            _check_vllm_fits()
        self._rank = TrainerRank(spec)
        self._embedded = EmbeddedEngine(self._rank.policy, spec.execution.rollout_batch_size, spec.model)
        self._vllm = _start_vllm(spec) if spec.settings.rl.engine == "vllm" else None
        self.trainer = Trainer(spec.settings, LocalRanks(self._rank))

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""
        if self._servers is not None:
            return self._servers.engine
        return self._embedded if self._vllm is None else self._vllm

    def publish(self, version: int) -> None:
        """Send the weights to vLLM or to the servers; the embedded engine shares them and only gets the version."""
        if self._servers is not None and version != self._servers.engine.weight_version:
            self._servers.update(self.trainer, version)
        if self._vllm is not None and version != self._vllm.weight_version:
            self._vllm.load_weights(self._rank.policy.weights(), version)
        self._embedded.weight_version = version

    def metrics(self) -> dict[str, float]:
        """Empty: a single process has no cluster metrics."""
        return {}

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        for started in (self._servers, self._vllm):
            if started is not None:
                started.close()


def _check_vllm_fits() -> None:
    """Raise ConfigError where there is no vLLM, or a GPU that one process would have to share between two users."""
    check_installed()
    if torch.cuda.is_available():
        raise ConfigError(
            "rl.engine: vllm shares the trainer's process, which works only without a GPU; on a GPU remove it and set "
            "cluster: ray with execution.ray.placement: colocated, where an engine sleeps while the trainer learns"
        )


def _start_vllm(spec: TrainerSpec) -> VLLMEngine:
    settings = spec.settings
    return VLLMEngine.from_folder(
        spec.model,
        spec.execution.vllm,
        settings.dtype,
        max_model_len=spec.longest,
        reads_text=bool(settings.rl.stop),
    )
