"""Services that show runs besides the files: Weights & Biases and TensorBoard, each behind three methods.

Each works in a thread of its own, so that one that hangs, or that no network reaches, costs no training step; one that
fails is off for the rest of the run, with one warning. None gets a key from the configuration: they read their own
environment variables.
"""

import json
import logging
import netrc
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import TYPE_CHECKING, Any, Literal, Protocol
from urllib.parse import urlsplit

from luffy.config.execution import TrackingConfig
from luffy.tracking.metrics import NAMESPACES

if TYPE_CHECKING:
    import wandb

    from luffy.tracking.tracker import SampleRollout

logger = logging.getLogger(__name__)
ACCURACY = "accuracy"
"""Namespace of the final accuracies of a whole run."""
_START_TIMEOUT_S = 30
_FINISH_TIMEOUT_S = 60.0
_MOST_WAITING = 10_000
"""Calls that a service may be behind."""
_MAX_ID_LENGTH = 64
_KEY_VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A stage, or a whole run, as services show it."""

    key: str
    """Names it in every service: the same after a restart, which continues it."""
    labels: Mapping[str, str]
    """`experiment`, `method`, `stage`, `seed`, and the name of the `run` that groups its stages; as far as known."""
    out: Path
    config: Mapping[str, object]
    resumed_from: int = 0
    report: str = ""
    stages: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """For a whole run, by stage: what the run did with it (`reused`) and the key under which services show it."""
    words: Sequence[str] = ()
    """`tracking.tags`."""
    note: str = ""
    """`tracking.note`."""

    @property
    def id(self) -> str:
        return re.sub(r"[^A-Za-z0-9_-]", "-", self.key)[:_MAX_ID_LENGTH]

    @property
    def name(self) -> str:
        """`smoke · luffy · rl · seed 7`."""
        shown = {**self.labels, "seed": f"seed {self.labels['seed']}" if "seed" in self.labels else ""}
        return " · ".join(filter(None, (shown.get(label) for label in ("experiment", "method", "stage", "seed"))))

    @property
    def tags(self) -> list[str]:
        return [*(f"{label}:{value}"[:_MAX_ID_LENGTH] for label, value in self.labels.items()), *self.words]

    def notes(self, runs_url: str = "") -> str:
        """Where the report is, and each stage with its key, as Markdown; `runs_url`: where a key's page is."""
        lines = [self.note, ""] if self.note else []
        lines += [f"report: {self.report}"] if self.report else []
        for stage, (action, key) in self.stages.items():
            lines.append(f"- {stage}: {action}, {f'[{key}]({runs_url}{key})' if runs_url else key}")
        return "\n".join(lines)


class Service(Protocol):
    """What a service does with a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def samples(self, step: int, rows: "Sequence[SampleRollout]") -> None: ...
    def close(self, *, failed: bool) -> None: ...  # nothing is called after it


class ServiceThread:
    """Calls a service from a thread: no call waits for it, and none is lost before `close` has waited for a minute."""

    def __init__(self, name: str, start: Callable[[], Service]) -> None:
        self._name, self._start, self._is_off = name, start, False
        self._calls: Queue[Callable[[Service], None] | None] = Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def call(self, act: Callable[[Service], None] | None) -> None:
        """Queue a call; None ends the thread."""
        if not self._is_off:
            try:
                self._calls.put_nowait(act)
            except Full:
                self._give_up(f"it is {_MOST_WAITING} calls behind")

    def close(self, *, failed: bool) -> None:
        """Have the service close, and wait for it for a minute at most; not where it is off already."""
        if self._is_off:
            return
        self.call(lambda service: service.close(failed=failed))
        self.call(None)
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._give_up(f"it has not taken everything after {_FINISH_TIMEOUT_S:g} s")

    def _serve(self) -> None:
        try:
            service = self._start()
            while not self._is_off and (act := self._calls.get()) is not None:
                act(service)
        except Exception as error:  # noqa: BLE001 - a network, a key, a full disk: none may end hours of training
            self._give_up(f"{type(error).__name__}: {error}".splitlines()[0])

    def _give_up(self, why: str) -> None:
        if not self._is_off:
            self._is_off = True
            logger.warning("%s is off for the rest of this run: %s", self._name, why)


def open_services(run: TrackedRun, tracking: TrackingConfig) -> list[ServiceThread]:
    """The services that are configured, each with `run` begun or continued."""
    run = replace(run, words=tracking.tags, note=tracking.note)
    found: list[tuple[str, Callable[[], Service]]] = []
    if tracking.wandb != "disabled":
        found.append(("wandb", partial(WandbService, run, tracking)))
    if tracking.tensorboard is not None:
        found.append(("tensorboard", partial(TensorBoardService, run, tracking.tensorboard)))
    return [ServiceThread(name, start) for name, start in found]


class WandbService:
    """One wandb run per stage; a restart continues it, since its id comes from the stage's key.

    It has the stage's settings as config, its metrics over `step` by namespace, a table of rollouts for each step that
    writes some, and at its end an artifact that refers to the stage's files (none of them is uploaded). Without an API
    key the run is kept offline in the stage's directory, for `wandb sync`.
    """

    def __init__(self, run: TrackedRun, tracking: TrackingConfig) -> None:
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
        self._tracked = run
        self._run = wandb.init(
            entity=tracking.wandb_entity,
            project=tracking.wandb_project,
            id=run.id,
            name=run.name,
            group=run.labels.get("run"),
            job_type=run.labels.get("stage"),
            tags=run.tags,
            notes=run.notes(),
            resume="allow",
            mode=wandb_mode(tracking),
            dir=str(run.out),
            config=dict(run.config),
            settings=settings,
        )
        if run.stages and (page := self._run.url):
            self._run.notes = run.notes(page.removesuffix(run.id))
        self._run.define_metric("step", hidden=True)
        for namespace in (*NAMESPACES, ACCURACY):
            self._run.define_metric(f"{namespace}/*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # `step` as a value: wandb's own counter cannot go back after a resume.
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, rows: "Sequence[SampleRollout]") -> None:
        import wandb

        columns: list[str | int] = ["step", *asdict(rows[0])]
        data: list[Iterable[Any]] = [[step, *astuple(row)] for row in rows]
        self._run.log({"step": step, "samples": wandb.Table(columns=columns, data=data)})

    def close(self, *, failed: bool) -> None:
        if not failed:
            self._run.log_artifact(_reference(self._tracked))
        self._run.finish(exit_code=int(failed))


class TensorBoardService:
    """Event files in a folder per stage, `FOLDER/NAME-KEY`; a restart replaces what came after its checkpoint."""

    def __init__(self, run: TrackedRun, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter  # torch loads for seconds

        place = Path(folder).expanduser() / f"{run.name.replace(' · ', '_').replace('/', '-')}-{run.id}"
        self._writer = SummaryWriter(str(place), purge_step=run.resumed_from + 1 if run.resumed_from else None)
        words = {"run": run.labels.get("run", ""), "notes": run.notes(), "configuration": _fenced(run.config)}
        for name, text in words.items():
            self._writer.add_text(name, text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: "Sequence[SampleRollout]") -> None:
        for index, row in enumerate(rows):
            self._writer.add_text(f"samples/{index}", _fenced(asdict(row)), step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


def wandb_mode(tracking: TrackingConfig) -> Literal["offline", "online"]:
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


def _fenced(value: object) -> str:
    return f"```\n{json.dumps(value, indent=1, ensure_ascii=False, default=str)}\n```"


def _reference(run: TrackedRun) -> "wandb.Artifact":
    import wandb

    named, about = f"{run.labels.get('stage', 'stage')}-{run.id}", {"key": run.key, "directory": str(run.out)}
    artifact = wandb.Artifact(named, type="stage", metadata=about)
    for path in sorted(run.out.resolve().iterdir()):
        if path.name != "wandb" and not path.name.startswith("."):
            # Without a checksum: the stage's manifest has the hashes, and weights should not be read again for one.
            artifact.add_reference(path.as_uri(), name=path.name, checksum=False)
    return artifact
