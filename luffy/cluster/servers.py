"""Rollouts from vLLM servers, which read the trainer's weights from a shared folder."""

import shutil

from luffy.rollout.server_engine import ServerEngine
from luffy.training.learner import Trainer, TrainerSpec

_PUBLISHED = "published"


class Servers:
    """The servers of `execution.server` as rollout engine, loaded with the trainer's initial model.

    Raises ConfigError for servers that cannot be used.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        config = spec.execution.server
        self._folder = spec.out / _PUBLISHED
        self.engine = ServerEngine.from_folder(
            spec.model, config, spec.settings.dtype, max_model_len=spec.longest, weight_version=0
        )

    def update(self, trainer: Trainer, version: int) -> None:
        """Send the trainer's current weights as `version`; running responses continue after the update."""
        trainer.export(self._folder)
        self.engine.load_weights_from(self._folder, version)
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Close the connections."""
        self.engine.close()
