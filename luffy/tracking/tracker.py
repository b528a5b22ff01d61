"""Where a training loop reports: metrics and samples go to files always, and to Weights & Biases when configured.

with Tracker(context.out, context.key, context.node, context.tracking, settings, resumed_from=step) as tracker:
    tracker.log(step, {"actor/loss": 0.3})
    tracker.samples(step, rollouts)

`samples.jsonl` has a few rollouts at intervals, as readable text.
"""

import logging
import netrc
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import psutil
from pydantic import TypeAdapter

from luffy.config.execution import TrackingConfig
from luffy.config.strict import StrictModel
from luffy.tracking.metrics import METRICS_FILE, NAMESPACES, StepLines, metric_line, read_lines
from luffy.tracking.step_times import START

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)
_START_TIMEOUT_S = 30
_FINISH_TIMEOUT_S = 60
_MAX_ID_LENGTH = 64
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")
SAMPLES_FILE = "samples.jsonl"
_NOTHING = -1
"""Comes before step 0."""


@dataclass(frozen=True, slots=True)
class SampleRollout:
    """One response of one RL step."""

    uid: str
    prompt: str
    response: str
    source: Literal["on_policy", "off_policy"]
    reward: float
    outcome: str
    advantage: float | None
    """Advantage of the whole response, before any scaling; None where each token has its own (GAE)."""
    measures: dict[str, float] = field(default_factory=dict)
    """Rewards by component and counts of an episode with an environment."""
    hint_level: int | None = None
    """Level of the hint that was in the prompt while the response was sampled; None: no hint."""
    hint: str = ""


def read_samples(path: Path) -> Iterator[tuple[int, SampleRollout]]:
    """Yield (step, rollout) in the order of the file; nothing where there is no file."""
    rollout = TypeAdapter(SampleRollout)
    for line in read_lines(path):
        step = line["step"]
        assert isinstance(step, int)
        yield step, rollout.validate_python(line)


class Tracker:
    """Writes `metrics.jsonl` and, once there is a sample, `samples.jsonl` in `out`.

    Steps count from 1; step 0 is a validation of the weights that training starts from. Lines after step `resumed_from`
    are dropped first, all of them where it is 0, so that after a resume the files equal those of an uninterrupted run.
    `key` and `name` are the stage's; `settings` are shown in wandb.
    """

    def __init__(
        self, out: Path, key: str, name: str, tracking: TrackingConfig, settings: StrictModel, resumed_from: int = 0
    ) -> None:
        self._start: dict[str, float] = {}
        self._metrics = StepLines(out / METRICS_FILE)
        self._metrics.truncate(resumed_from or _NOTHING)
        self._samples_path = out / SAMPLES_FILE
        self._samples: StepLines | None = None
        if self._samples_path.exists():
            self._samples = StepLines(self._samples_path)
            self._samples.truncate(resumed_from)
        self._wandb = WandbRun(out, key, name, tracking, settings.model_dump(mode="json"))

    def started(self) -> None:
        """Record, with the next line, how long it took until now from the start of this process."""
        self._start = {START: time.time() - psutil.Process().create_time()}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; their names start with one of `NAMESPACES`."""
        whole = {**metrics, **self._start}
        self._start = {}
        self._metrics.append(metric_line(step, whole))
        self._wandb.log(step, whole)

    def samples(self, step: int, rows: Sequence[SampleRollout]) -> None:
        """Record rollouts of `step`."""
        if self._samples is None:
            self._samples = StepLines(self._samples_path)
        for row in rows:
            self._samples.append({"step": step, **asdict(row)})
        self._wandb.samples(step, rows)

    def close(self, *, failed: bool = False) -> None:
        """Make the files durable and end the wandb run."""
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()
        self._wandb.close(failed=failed)

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)


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
        if (run := self._run) is not None:
            # `step` as a value: wandb's own counter cannot go back after a resume.
            self._guarded("log", lambda: run.log({"step": step, **metrics}))

    def samples(self, step: int, rows: Sequence[SampleRollout]) -> None:
        """Send the rollouts of `step` as a table."""
        if (run := self._run) is not None and rows:
            self._guarded("log", lambda: run.log({"step": step, "samples": _table(step, rows)}))

    def close(self, *, failed: bool = False) -> None:
        """Send what is left and, unless the stage has `failed`, a reference to its files; give up after a minute."""
        if (run := self._run) is not None and not failed:
            send = run.log_artifact
            self._guarded("log_artifact", lambda: send(_reference(self._out, self._key, self._name)))
        if (run := self._run) is not None:  # sending may have failed
            self._run = None
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
            first = f"{type(error).__name__}: {error}".splitlines()[0]
            logger.warning("wandb is off for the rest of this run: %s failed (%s)", action, first)


def run_id(key: str) -> str:
    """The id of the wandb run of the stage `key`: the same after every restart."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", key)[:_MAX_ID_LENGTH]


def _mode(tracking: TrackingConfig) -> Literal["offline", "online"]:
    """Online only where wandb finds an API key; without one it would prompt on the terminal."""
    if tracking.wandb == "offline":
        return "offline"
    if any(os.environ.get(name) for name in _KEY_VARIABLES):
        return "online"
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in files:
        try:
            if netrc.netrc(file).authenticators(host) is not None:
                return "online"
        except (OSError, netrc.NetrcParseError):
            continue
    logger.warning("wandb: no API key here (WANDB_API_KEY or `wandb login`), so the run is kept offline")
    return "offline"


def _table(step: int, rows: Sequence[SampleRollout]) -> "wandb.Table":
    import wandb

    data: list[Any] = [[step, *astuple(row)] for row in rows]
    return wandb.Table(columns=["step", *(field.name for field in fields(rows[0]))], data=data)


def _reference(out: Path, key: str, name: str) -> "wandb.Artifact":
    import wandb

    artifact = wandb.Artifact(f"{name}-{run_id(key)}", type="stage", metadata={"key": key, "directory": str(out)})
    for path in sorted(out.resolve().iterdir()):
        if path.name != "wandb" and not path.name.startswith("."):
            # Without a checksum: the stage's manifest has the hashes, and weights should not be read again for one.
            artifact.add_reference(path.as_uri(), name=path.name, checksum=False)
    return artifact
