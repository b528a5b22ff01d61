"""Weights & Biases, when configured. No failure of it ends a run: it is switched off with one warning in the log."""

import logging
import netrc
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from luffy.config.execution import TrackingConfig
from luffy.tracking.metrics import NAMESPACES

if TYPE_CHECKING:
    import wandb

    from luffy.tracking.tracker import SampleRollout

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 30
_FINISH_TIMEOUT_S = 60
_MAX_ID_LENGTH = 64
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
_SAMPLES = "samples"
_OWN_FOLDER = "wandb"


class WandbRun:
    """One wandb run per stage; a restart continues it, since its id comes from the stage's key.

    It has the stage's settings as config, its metrics over `step` by namespace, a table of rollouts for each step that
    writes some, and at its end an artifact that refers to the stage's files (none of them is uploaded). Without an API
    key the run is kept offline in the stage's directory, for `wandb sync`.
    """

    def __init__(self, out: Path, key: str, name: str, tracking: TrackingConfig, config: Mapping[str, object]) -> None:
        self._out, self._key, self._name = out, key, name
        self._run: wandb.Run | None = None
        if tracking.wandb != "disabled":
            self._guarded("start", lambda: self._start(tracking, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of `step`."""
        run = self._run
        if run is not None:
            # `step` as a value: wandb's own counter cannot go back after a resume.
            self._guarded("log", lambda: run.log({"step": step, **metrics}))

    def samples(self, step: int, rows: Sequence["SampleRollout"]) -> None:
        """Send the rollouts of `step` as a table."""
        run = self._run
        if run is not None and rows:
            self._guarded("log", lambda: run.log({"step": step, _SAMPLES: _table(step, rows)}))

    def close(self, *, failed: bool = False) -> None:
        """Send what is left and, unless the stage has `failed`, a reference to its files; give up after a minute."""
        run = self._run
        if run is not None and not failed:
            send = run.log_artifact
            self._guarded("log_artifact", lambda: send(_reference(self._out, self._key, self._name)))
        run, self._run = self._run, None
        if run is not None:
            self._guarded("finish", partial(run.finish, exit_code=int(failed)))

    def _start(self, tracking: TrackingConfig, config: Mapping[str, object]) -> None:
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
            id=run_id(self._key),
            name=self._name,
            resume="allow",
            mode=_mode(tracking),
            dir=str(self._out),
            config=dict(config),
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        for namespace in NAMESPACES:
            self._run.define_metric(f"{namespace}/*", step_metric="step")

    def _guarded(self, action: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a network, a key, a full disk: none may end hours of training
            self._run = None
            logger.warning("wandb is off for the rest of this run: %s failed (%s)", action, _one_line(error))


def run_id(key: str) -> str:
    """The id of the wandb run of the stage `key`: the same after every restart."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", key)[:_MAX_ID_LENGTH]


def _mode(tracking: TrackingConfig) -> Literal["offline", "online"]:
    if tracking.wandb == "offline":
        return "offline"
    if not _has_key():
        logger.warning("wandb: no API key here (WANDB_API_KEY or `wandb login`), so the run is kept offline")
        return "offline"
    return "online"


def _has_key() -> bool:
    """Whether wandb would find an API key; without one it would prompt on the terminal."""
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _table(step: int, rows: Sequence["SampleRollout"]) -> "wandb.Table":
    import wandb

    columns = ["step", *(field.name for field in fields(rows[0]))]
    data: list[Any] = [[step, *astuple(row)] for row in rows]
    return wandb.Table(columns=list(columns), data=data)


def _reference(out: Path, key: str, name: str) -> "wandb.Artifact":
    import wandb

    artifact = wandb.Artifact(f"{name}-{run_id(key)}", type="stage", metadata={"key": key, "directory": str(out)})
    for path in sorted(out.resolve().iterdir()):
        if path.name != _OWN_FOLDER and not path.name.startswith("."):
            # Without a checksum: the stage's manifest has the hashes, and weights should not be read again for one.
            artifact.add_reference(path.as_uri(), name=path.name, checksum=False)
    return artifact


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
