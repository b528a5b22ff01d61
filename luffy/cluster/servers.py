"""Engines that run elsewhere: vLLM servers, which read the trainer's weights from a folder they share with it."""

import shutil

from luffy.rollout.server_engine import ServerEngine
from luffy.training.trainer import Trainer, TrainerSpec

_PUBLISHED = "published"


class Servers:
    """The servers of `execution.server` as the engine of a run; they begin with the model the trainer begins with.

    Raises ConfigError for servers that cannot be used.
    """

    def __init__(self, spec: TrainerSpec) -> None:
        config = spec.execution.server
        self._folder = spec.out / _PUBLISHED
        self.engine = ServerEngine.from_folder(
            spec.model, config, spec.settings.dtype, max_model_len=spec.longest, weight_version=0
        )

    def update(self, trainer: Trainer, version: int) -> None:
        """Give the servers the trainer's present weights, those of `version`; what runs there goes on behind them."""
        trainer.export(self._folder)
        self.engine.load_weights_from(self._folder, version)
        shutil.rmtree(self._folder)

    def close(self) -> None:
        """Let the servers go."""
        self.engine.close()
