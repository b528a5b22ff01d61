"""Weights & Biases, where configured. It may fail in any way it likes: the run goes on, with one warning in the log."""

import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from luffy.config.execution import TrackingConfig
from luffy.tracking.metrics import NAMESPACES

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 30
_FINISH_TIMEOUT_S = 60
_MAX_ID_LENGTH = 64


class WandbRun:
    """One wandb run a stage; a restart continues it, since its id comes from the stage's key."""

    def __init__(self, out: Path, key: str, name: str, tracking: TrackingConfig, config: Mapping[str, object]) -> None:
        self._run: wandb.Run | None = None
        if tracking.wandb != "disabled":
            self._guarded("start", lambda: self._start(out, key, name, tracking, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of `step`."""
        run = self._run
        if run is not None:
            # `step` as a value: wandb's own counter refuses to go back after a resume.
            self._guarded("log", lambda: run.log({"step": step, **metrics}))

    def close(self) -> None:
        """Send what is left; gives up after a minute."""
        run, self._run = self._run, None
        if run is not None:
            self._guarded("finish", lambda: run.finish(exit_code=0))

    def _start(self, out: Path, key: str, name: str, tracking: TrackingConfig, config: Mapping[str, object]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's own crash reports; read at import
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            init_timeout=_START_TIMEOUT_S,
            login_timeout=_START_TIMEOUT_S,
            finish_timeout=_FINISH_TIMEOUT_S,
            disable_git=True,
            disable_code=True,
        )
        self._run = wandb.init(
            project=tracking.wandb_project,
            id=run_id(key),
            name=name,
            resume="allow",
            mode="offline" if tracking.wandb == "offline" else "online",
            dir=str(out),
            config=dict(config),
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        for namespace in NAMESPACES:
            self._run.define_metric(f"{namespace}/*", step_metric="step")

    def _guarded(self, action: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a network, a key, a full disk: none may end hours of training
            self._run = None
            logger.warning("wandb is off for the rest of this run: %s failed (%s)", action, _one_line(error))


def run_id(key: str) -> str:
    """The id of the wandb run of the stage `key`: the same after every restart."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", key)[:_MAX_ID_LENGTH]


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
