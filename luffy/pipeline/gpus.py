"""The GPUs of this machine: detection, the number a stage takes, and exclusive allocation to stages.

Each GPU has a lock file (`flock`, one directory per user and machine). The supervisor of a stage holds the lock, and
its death releases it. The stage sees only the GPUs locked for it.
"""

import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from luffy.config import STAGE_KINDS, ExperimentConfig
from luffy.config.settings import gpus_in, scored_by
from luffy.errors import EXIT_INTERRUPTED, ConfigError, LostError, StageFailed, WorkspaceError
from luffy.pipeline.lock import try_lock

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"
_NONE: tuple[list[str], ...] = ([], ["-1"], ["NoDevFiles"])
"""How CUDA_VISIBLE_DEVICES begins where it hides all GPUs, by a person or by Slurm."""
_PART = "MIG-"
"""Names of parts of a GPU, which `nvidia-smi` does not list here."""
_QUERY_TIMEOUT_S = 10.0
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_POLL_S = 1.0
_DRIVER_PAUSE_S = 5.0
_DRIVER_QUERIES = 6
Waiting = Callable[[str], None]
"""Called once when a wait begins, with what it waits for."""
Stopped = Callable[[], bool]
"""Whether to give up waiting."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    """Its name in CUDA_VISIBLE_DEVICES."""
    uuid: str
    memory_gib: float


def detected_gpus() -> tuple[Gpu, ...] | None:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES admits; None if the driver does not respond.

    Uses `nvidia-smi`, to avoid importing torch. Without it the machine has no GPU. Raises ConfigError if the variable
    names a GPU twice, or one that this machine has not: CUDA would silently go without, or hide all that follow.
    """
    try:
        gpus = [Gpu(index, uuid, _memory_gib(mib)) for index, uuid, mib in _queried("index,uuid,memory.total")]
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    names = _admitted_names()
    if names is None or names[:1] in _NONE:
        return tuple(gpus) if names is None else ()
    found = [
        [Gpu(name, gpu.uuid, gpu.memory_gib) for gpu in gpus if name == gpu.name or gpu.uuid.startswith(name)]
        for name in names
        if not name.startswith(_PART)
    ]
    uuids = [gpu.uuid for of_name in found for gpu in of_name]
    if any(len(of_name) != 1 for of_name in found) or len({*uuids}) < len(uuids):
        raise ConfigError(
            f"{_VISIBLE}={','.join(names)}: names a GPU that this machine has not, or one twice; it has "
            f"{', '.join(gpu.name for gpu in gpus)}; correct the variable, or unset it"
        )
    return tuple(gpu for of_name in found for gpu in of_name)


def _queried(fields: str) -> list[list[str]]:
    """What the driver says of each GPU of the machine."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]


def _memory_gib(mib: str) -> float:
    """A GPU's memory; where it has none of its own, as in a DGX Spark, that of the machine."""
    return psutil.virtual_memory().total / 2**30 if mib == "[N/A]" else float(mib) / 2**10


def hidden_gpus() -> str:
    """The kinds of this machine's GPUs where CUDA_VISIBLE_DEVICES hides all of them, else empty."""
    names = _admitted_names()
    if names is None or names[:1] not in _NONE:
        return ""
    try:
        return ", ".join(map(" ".join, _queried("name")))
    except (OSError, subprocess.SubprocessError):
        return ""  # no GPUs, or a driver that does not respond


def _admitted_names() -> list[str] | None:
    """The names in CUDA_VISIBLE_DEVICES; None where it is not set."""
    listed = os.environ.get(_VISIBLE)
    return None if listed is None else [name.strip() for name in listed.split(",") if name.strip()]


def gpus_of_stage(config: ExperimentConfig, stage: str) -> int:
    """GPUs that `stage` takes if this machine has any (`execution.gpus`)."""
    found = gpus_in(config, STAGE_KINDS[stage])
    if not found and config.execution.reward_device != "cpu" and scored_by(config, stage):
        found = 1
    return found if found == 0 or config.execution.gpus is None else config.execution.gpus


def trains_here(config: ExperimentConfig, stage: str) -> bool:
    """Whether `stage` trains with `execution.ranks`, of which there are no more than GPUs where there are GPUs."""
    return stage == "base" or (stage in ("sft", "rl") and config.cluster == "local")


@contextmanager
def own_gpus(
    wanted: int, waiting: Waiting = lambda what: None, stopped: Stopped = lambda: False, *, fewer: bool = False
) -> Iterator[Mapping[str, str]]:
    """Hold `wanted` GPUs, after waiting for busy ones; yields the environment variables that select them.

    Does nothing on a machine without GPUs. Where the machine has fewer, `fewer` takes all of them, and otherwise raises
    ConfigError. Raises LostError if its driver does not respond, StageFailed once `stopped`.
    """
    gpus = _present_gpus(waiting, stopped) if wanted else ()
    if not gpus:
        yield {}
        return
    wanted = min(wanted, len(gpus)) if fewer else wanted
    if wanted > len(gpus):
        raise ConfigError(
            f"the stage takes {wanted} GPUs, this machine has {len(gpus)}; lower execution.vllm.engines, "
            "execution.vllm.tensor_parallel_size, execution.ray or execution.gpus"
        )
    with ExitStack() as held:
        names = {_VISIBLE: ",".join(gpu.name for gpu in _lock(gpus, wanted, held, waiting, stopped))}
        # By default CUDA numbers GPUs by speed; nvidia-smi numbers them by bus.
        yield names if _VISIBLE in os.environ else {**names, _ORDER: "PCI_BUS_ID"}


def _present_gpus(waiting: Waiting, stopped: Stopped) -> tuple[Gpu, ...]:
    """The GPUs of this machine; asks a driver that does not respond several times.

    Without an answer a stage must not start: it would run beside the stages that hold the GPUs.
    """
    for query in range(_DRIVER_QUERIES):
        if query:
            pause(stopped, _DRIVER_PAUSE_S)
        if (gpus := detected_gpus()) is not None:
            return gpus
        if not query:
            waiting("the NVIDIA driver, which does not respond")
    raise LostError(
        f"the NVIDIA driver did not respond {_DRIVER_QUERIES} times (nvidia-smi --query-gpu); once it does, the same "
        "command continues; on a machine without GPUs set execution.gpus=0"
    )


def _make_own(folder: Path) -> None:
    """Make a folder in the temporary one, where anybody may have put something under its name."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise WorkspaceError(
            f"{folder}: holds the locks of GPUs, and is a link, or another user's, or others may write in it; remove "
            "it, or name another folder in TMPDIR"
        )


def _lock(gpus: Sequence[Gpu], wanted: int, held: ExitStack, waiting: Waiting, stopped: Stopped) -> list[Gpu]:
    """Lock `wanted` GPUs or none, so that two waiting stages cannot deadlock."""
    folder = Path(tempfile.gettempdir()) / f"luffy-gpus-{os.getuid()}"
    announced = False
    while True:
        _make_own(folder)  # somebody may clean the temporary folder while stages wait
        with ExitStack() as attempt:
            locked: list[Gpu] = []
            for gpu in gpus:
                descriptor = os.open(folder / f"{gpu.uuid}.lock", _LOCK_FLAGS, 0o600)
                if not try_lock(descriptor):
                    os.close(descriptor)
                    continue
                attempt.callback(os.close, descriptor)
                locked.append(gpu)
                if len(locked) == wanted:
                    held.push(attempt.pop_all())
                    return locked
        if not announced:
            waiting(f"{wanted} of {len(gpus)} GPUs")
            announced = True
        pause(stopped)


def pause(stopped: Stopped, seconds: float | None = None) -> None:
    """Wait for `seconds`, by default one poll interval; raises StageFailed once `stopped`."""
    deadline = time.monotonic() + (_POLL_S if seconds is None else seconds)
    while not stopped():
        if (left := deadline - time.monotonic()) <= 0:
            return
        time.sleep(min(left, _POLL_S))
    raise StageFailed("interrupted while waiting; the same command resumes it", EXIT_INTERRUPTED)
