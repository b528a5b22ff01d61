"""`cluster: local`: one process, in which trainer and engine share one model and run in turn."""

from collections.abc import Sequence

from luffy.cluster.servers import Servers
from luffy.rollout.engine import Completion, RolloutEngine, RolloutRequest, SamplingParams
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.training.policy import Policy
from luffy.training.ranks import LocalRanks
from luffy.training.trainer import Trainer, TrainerRank, TrainerSpec


class EmbeddedEngine:
    """Generates with the current weights of the policy in training."""

    def __init__(self, policy: Policy, batch_size: int) -> None:
        self._policy = policy
        self._batch_size = batch_size
        self.weight_version = 0

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        """One completion a request, in the order of the requests."""
        with self._policy.inference_model() as model:
            return TransformersEngine(model, self._batch_size, self.weight_version).generate(requests, params)

    def close(self) -> None:
        """Nothing to free: the policy belongs to the trainer."""


class LocalCluster:
    """One trainer rank in this process, and the embedded engine or servers elsewhere."""

    def __init__(self, spec: TrainerSpec) -> None:
        self._servers = Servers(spec) if spec.settings.rl.engine == "openai" else None
        self._rank = TrainerRank(spec)
        self._embedded = EmbeddedEngine(self._rank.policy, spec.execution.rollout_batch_size)
        self.trainer = Trainer(spec.settings, LocalRanks(self._rank))

    @property
    def engine(self) -> RolloutEngine:
        """Generates with the weights published last."""
        return self._embedded if self._servers is None else self._servers.engine

    def publish(self, version: int) -> None:
        """Send the weights to the servers, if any; the embedded engine shares them and only gets the version."""
        if self._servers is not None and version != self._servers.engine.weight_version:
            self._servers.update(self.trainer, version)
        self._embedded.weight_version = version

    def metrics(self) -> dict[str, float]:
        """Empty: a single process has no cluster metrics."""
        return {}

    def __enter__(self) -> "LocalCluster":
        return self

    def __exit__(self, *_: object) -> None:
        if self._servers is not None:
            self._servers.close()
