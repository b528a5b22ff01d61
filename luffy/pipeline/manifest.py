"""The record of a finished stage: `manifest.json`, written last, so that its presence means that the stage is done.

Outputs are compared by size and modification time; a file whose time differs is hashed before it counts as changed,
so that a copied workspace stays valid. `verify` hashes every file.
"""

import errno
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib import metadata
from pathlib import Path
from stat import S_IROTH

import psutil
from pydantic import ConfigDict, ValidationError, field_validator

from luffy import __version__
from luffy.config.execution import ExecutionConfig
from luffy.config.removed import without_removed
from luffy.config.strict import StrictModel
from luffy.errors import LuffyError
from luffy.files import refuse_special, write_atomic

MANIFEST_FILE = "manifest.json"
_PACKAGES = ("torch", "transformers", "deepspeed", "ray", "vllm", "math-verify", "pyarrow", "numpy", "prefect")
_REPOSITORY = Path(__file__).resolve().parents[2]
_CODE = ("*.py", "*.jinja")
_SETTLED = ("core.fsmonitor=false", f"core.hooksPath={os.devnull}", "diff.autoRefreshIndex=false")
"""Settings of git under which a repository of others runs no program of its own; a refresh would filter every file."""
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--ignore-submodules=all")
_MAX_PATCH_BYTES = 10**7
_GIT_S = 10.0


class OutputFile(StrictModel):
    """One file of a stage's result."""

    path: str
    """Relative to the stage's directory, with `/`."""
    bytes: int
    mtime_ns: int
    sha256: str


class Manifest(StrictModel):
    """The record of a finished stage: its outputs, inputs and circumstances. Fields of another version are ignored."""

    model_config = ConfigDict(extra="ignore")

    stage: str
    node: str
    key: str
    series: str | None
    """Shared by all lengths of an extendable run."""
    settings: Mapping[str, object]
    upstream: dict[str, str]
    """Input name to the upstream stage's key."""
    consumed: dict[str, str]
    """Input name to the digest of what was read there."""
    outputs: tuple[OutputFile, ...]
    metrics: dict[str, float]
    execution: ExecutionConfig
    versions: dict[str, str]
    hardware: dict[str, str]
    started: str
    """Start of the last attempt: ISO 8601, UTC."""
    ended: str
    earlier_s: float = 0.0
    """Seconds of work in all earlier attempts since the directory was last cleared: in each until its last event."""
    resumed_from: int = 0
    """Step of the checkpoint that the last attempt started from; 0: from the beginning."""
    extended: str | None = None
    """Key of the shorter run that was continued."""
    adopted: str | None = None
    """Key of the result that this one is: it was made by other code, which somebody has said to make the same."""
    scratch: tuple[str, ...] = ()
    """Folders that the stage needed until it was finished; still there only after a kill."""

    @field_validator("execution", mode="before")
    @classmethod
    def _of_this_version(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        # What a validator returns is Python to pydantic, whose lists would not pass for tuples.
        return ExecutionConfig.model_validate_json(json.dumps(without_removed(value, finished=True)))

    @property
    def attempt_s(self) -> float:
        return (datetime.fromisoformat(self.ended) - datetime.fromisoformat(self.started)).total_seconds()

    @property
    def total_s(self) -> float:
        """Seconds of all attempts since the directory was last cleared; those of a shorter run are not among them."""
        return self.earlier_s + self.attempt_s

    @property
    def digest(self) -> str:
        """Hash over all outputs: 64 hex digits."""
        return self.digest_under("")

    def digest_under(self, folder: str) -> str:
        """Hash over the outputs below `folder` ("": all of them)."""
        inside = (output for output in self.outputs if output.path.startswith(folder))
        lines = sorted(f"{output.path}\0{output.sha256}\n" for output in inside)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def damaged(self, directory: Path, *, verify: bool = False) -> dict[str, str]:
        """Damaged outputs, each as "missing" or "changed"; empty if all are intact."""
        found = {}
        for output in self.outputs:
            file = directory / output.path
            try:
                stat = file.stat()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    raise
                found[output.path] = "missing"
                continue
            is_hashed = verify or stat.st_mtime_ns != output.mtime_ns
            has_size = file.is_file() and stat.st_size == output.bytes
            if not has_size or (is_hashed and hash_file(file) != output.sha256):
                found[output.path] = "changed"
        return found


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None if it is missing, or unreadable for this version."""
    try:
        text = (directory / MANIFEST_FILE).read_text(encoding="utf-8")
        return Manifest.model_validate_json(text)
    except PermissionError:
        raise
    except (OSError, UnicodeDecodeError, ValidationError):  # also a folder of that name, or a link to itself
        return None


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Mark the stage as finished."""
    write_atomic(directory / MANIFEST_FILE, manifest.model_dump_json(indent=1) + "\n")


def delete_scratch(directory: Path, manifest: Manifest) -> None:
    """Delete the folders that a finished stage no longer needs."""
    for name in manifest.scratch:
        shutil.rmtree(directory / name, ignore_errors=True)


def collect_outputs(directory: Path, names: Iterable[str]) -> tuple[OutputFile, ...]:
    """The output files at `names` (files or folders in `directory`), hashed and flushed to disk.

    Raises LuffyError if a name has no file: a stage must not list outputs that it did not write.
    """
    files: set[Path] = set()
    for name in names:
        path = directory / name
        below = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        if not below:
            raise LuffyError(f"{path}: the stage lists it as an output, but it is missing (or an empty folder)")
        files.update(below)
    found = []
    for file in sorted(files):
        stat, relative = file.stat(), file.relative_to(directory).as_posix()
        found.append(OutputFile(path=relative, bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=hash_file(file)))
    return tuple(found)


def consumed_digest(input_name: str, manifest: Manifest) -> str:
    """The digest of what a stage reads through `input_name`: for a model only its folder, otherwise all outputs.

    So after a retraining that gives the same model, results made from it stay valid, although the times in its metrics
    differ.
    """
    return manifest.digest_under("model/" if input_name == "model" else "")


def consumed_digests(inputs: Mapping[str, Path]) -> dict[str, str]:
    """Input name to the digest of what a stage reads there; raises LuffyError when an input is not finished."""
    return {name: consumed_digest(name, finished_manifest(directory)) for name, directory in inputs.items()}


def finished_manifest(directory: Path) -> Manifest:
    """The manifest in `directory`; raises LuffyError when the stage there is not finished."""
    manifest = read_manifest(directory)
    if manifest is None:
        raise LuffyError(
            f"{directory}: not a finished stage (no readable {MANIFEST_FILE}); run the chain up to it first"
        )
    return manifest


def hash_file(path: Path) -> str:
    """SHA-256 of the content, 64 hex digits; OSError for a pipe or a device."""
    refuse_special(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def package_versions() -> dict[str, str]:
    """Versions of Python and of the relevant packages, and the commit of the code if there is one; no part of a key."""
    versions = {"python": platform.python_version(), "luffy": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    if (_REPOSITORY / ".git").exists():
        described = _git(_REPOSITORY, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
        if commit := described.decode().strip():
            versions["commit"] = commit
    return versions


def uncommitted_changes(leaving_out: Path) -> dict[str, bytes]:
    """By the name of each repository, of this code and of the working directory, a patch on its last commit.

    `git apply` restores it. Files that git does not know are in it if they are code (`_CODE`) outside of `leaving_out`,
    up to 10 MB. Files that others may not read, such as keys, are not, nor are those that a filter of git's writes
    (`git lfs`): the filter would be run. Empty without git.
    """
    patches: dict[str, bytes] = {}
    own = (_REPOSITORY,) if (_REPOSITORY / ".git").exists() else ()
    tops = [Path(_git(folder, "rev-parse", "--show-toplevel").decode().strip()) for folder in (*own, Path.cwd())]
    for top in dict.fromkeys(each for each in tops if each != Path()):
        filters = _git(top, "config", "--name-only", "--get-regexp", r"^filter\..*\.(clean|process)$").decode()
        written = {f":(exclude,attr:filter={line.split('.', 1)[1].rpartition('.')[0]})" for line in filters.split()}
        # A file that was only touched is not in the counts of lines, and would be among the names.
        counts = _git(top, *_DIFF, "--numstat", "--no-renames", "-z", "HEAD", "--", ".", *written).split(b"\0")
        changed = [os.fsdecode(count).split("\t", 2)[2] for count in counts if count]
        shown = [name for name in changed if not _is_private(top / name)]
        patch = _git(top, *_DIFF, "--binary", "HEAD", "--", *(f":(literal){name}" for name in shown)) if shown else b""
        for name in filter(None, _git(top, "ls-files", "-z", "--others", "--exclude-standard", *_CODE).split(b"\0")):
            path = top / os.fsdecode(name)
            kind = _git(top, "check-attr", "-z", "filter", "--", os.fsdecode(name)).split(b"\0")[2:3]
            if path.is_relative_to(leaving_out) or _is_private(path) or kind != [b"unspecified"]:
                continue
            if len(patch) + path.stat().st_size <= _MAX_PATCH_BYTES:
                patch += _git(top, *_DIFF, "--binary", "--no-index", "--", os.devnull, os.fsdecode(name))
        patches[f"{top.name}_2" if patches.get(top.name) else top.name] = patch
    return {name: patch for name, patch in patches.items() if patch}


def _is_private(path: Path) -> bool:
    return path.exists() and not path.stat().st_mode & S_IROTH


def _git(folder: Path, *arguments: str) -> bytes:
    """What git prints; nothing where it fails, which two files that differ are not.

    The repository may be a stranger's, whose configuration names programs.
    """
    command = ["git", *(word for setting in _SETTLED for word in ("-c", setting)), *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, check=False, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):  # not installed, or a huge tree
        return b""
    return done.stdout if done.returncode in (0, 1) else b""


def hardware() -> dict[str, str]:
    """Machine, CPU, memory and GPUs; GPUs only when the stage has loaded torch anyway."""
    names: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts = {
        "host": platform.node(),
        "system": platform.platform(),
        "cpu": names[0] if names else platform.machine(),
        "cpu_cores": str(os.cpu_count()),
        "memory_gib": f"{psutil.virtual_memory().total / 2**30:.0f}",
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        facts["gpu"] = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return facts
