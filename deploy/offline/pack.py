"""Pack luffy and its locked packages for a machine without a network.

    .venv/bin/python deploy/offline/pack.py KIT --python 3.12 --extras vllm
    .venv/bin/python deploy/offline/pack.py KIT --present pip_freeze.txt --leave-out 'torch,triton,nvidia-*'

KIT is a new folder: parts of at most `--part-mb` each, manifest.json with their digests, and unpack.py, which makes an
environment of them on the other machine. uv resolves and downloads.
"""

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = ("luffy", "flows", "tasks", "data", "exp_configs")
_FILES = ("pyproject.toml", "README.md", "LICENSE", "prefect.yaml")
_UNUSED = ("ray/jars/",)
"""Files of packages that nothing in Python reads, and that are large."""
CHUNK_BYTES = 64 << 20
"""Compressed, and decompressed, by one thread."""
# A window as large as the chunk, since libraries of GPU code repeat themselves over tens of megabytes. Higher presets
# take twice the time for 3 % less (deploy/offline/README.md).
_XZ = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": CHUNK_BYTES}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kit", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--python", default="3.12", help="of the other machine (default: %(default)s)")
    parser.add_argument(
        "--platform",
        default="x86_64-manylinux_2_34",
        help="of the other machine, in uv's words, such as aarch64-manylinux_2_34 (default: %(default)s)",
    )
    parser.add_argument("--extras", default="", help="of luffy: vllm,lora,…")
    parser.add_argument("--with", dest="more", action="append", default=[], help="a further package; may be repeated")
    parser.add_argument("--only", action="append", help="pack this package alone, without luffy or what it requires")
    parser.add_argument("--present", type=Path, help="`pip freeze` of the other machine; the same versions stay out")
    parser.add_argument("--leave-out", default="", help="never packed, whatever is there: torch,nvidia-*")
    parser.add_argument("--part-mb", type=int, default=60, help="(default: %(default)s)")
    given = parser.parse_args()
    if given.kit.exists():
        parser.error(f"{given.kit} exists: name a new folder")
    if given.part_mb < 1:
        parser.error(f"--part-mb {given.part_mb}: at least 1")
    if importlib.util.find_spec("uv") is None:
        parser.error(f"{sys.executable} has no uv: run it with .venv/bin/python, or pip install uv")
    target = ["--python-version", given.python, "--python-platform", given.platform]
    with tempfile.TemporaryDirectory(dir=given.kit.resolve().parent, prefix=".pack-") as folder:
        scratch = Path(folder)
        left_out = re.split(r"[,\s]+", given.leave_out.strip())
        wanted = given.only or _resolve(given, left_out, target, scratch)
        missing = _not_present(wanted, given.present, left_out)
        (scratch / "packed.txt").write_text("\n".join(missing))
        site = scratch / "site"
        _uv("pip", "install", "--target", site, "--no-deps", *target, "-r", scratch / "packed.txt")
        tar = scratch / "site.tar"
        with tarfile.open(tar, "w") as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name, filter=lambda file: None if file.name.startswith(_UNUSED) else file)
        kit = scratch / "kit"
        kit.mkdir()
        written = _write_parts(tar, kit, given.part_mb * 10**6)
        beside = bool(given.present or given.leave_out)
        manifest = {"python": given.python, "platform": given.platform, "beside": beside, **written}
        (kit / "manifest.json").write_text(
            json.dumps({**manifest, "packages": [line.partition(" @ ")[0] for line in missing]}, indent=1)
        )
        shutil.copy(Path(__file__).with_name("unpack.py"), kit)
        kit.rename(given.kit)
    size_mb = sum(written["chunks"]) / 1e6
    print(f"{given.kit}: {len(missing)} packages, {size_mb:.0f} MB in {len(written['parts'])} parts")  # noqa: T201
    return 0


def _wheel(scratch: Path) -> Path:
    """Luffy's wheel, built from a copy: a build leaves files in its folder, and takes those of an earlier one."""
    source = scratch / "source"
    for name in _SOURCES:
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "prepared")
        )
    for name in _FILES:
        shutil.copy(ROOT / name, source / name)
    _uv("build", "--wheel", "--out-dir", scratch, source)
    return next(scratch.glob("*.whl"))


def _resolve(given: argparse.Namespace, left_out: Sequence[str], target: Sequence[str], scratch: Path) -> list[str]:
    """`NAME==VERSION` for all packages, in the versions of constraints.txt."""
    wheel = _wheel(scratch)
    extras = f"[{given.extras}]" if given.extras else ""
    (scratch / "wanted.txt").write_text("\n".join([f"luffy-rl{extras} @ {wheel.as_uri()}", *given.more]))
    # What is left out is left out with its own requirements, and in no version contradicts another package.
    (scratch / "excludes.txt").write_text("\n".join(name for name in left_out if "*" not in name))
    lock = scratch / "lock.txt"
    options = ["--excludes", scratch / "excludes.txt", "--constraints", ROOT / "constraints.txt", "--output-file", lock]
    _uv("pip", "compile", "--no-header", "--no-annotate", *options, *target, scratch / "wanted.txt")
    return lock.read_text().splitlines()


def _not_present(wanted: Sequence[str], present: Path | None, left_out: Sequence[str]) -> list[str]:
    """The requirements without those that `present` has in the same version, or whose names are left out."""
    there = {_name_and_version(line) for line in present.read_text().splitlines()} if present else set()
    patterns = [_name_and_version(pattern)[0] for pattern in left_out]
    found = ((line, _name_and_version(line)) for line in wanted)
    return [
        line
        for line, pin in found
        if pin not in there and not any(fnmatch.fnmatchcase(pin[0], pattern) for pattern in patterns)
    ]


def _name_and_version(line: str) -> tuple[str, str]:
    """The normalised name, and the version without that of a build (2.13.0 of 2.13.0+cu130); '' where none is given."""
    name, _, version = re.sub(r"\s*(;| @ ).*", "", line.strip()).partition("==")
    return re.sub(r"[-_.]+", "-", name).lower(), version.partition("+")[0]


def _write_parts(tar: Path, kit: Path, part_bytes: int) -> dict[str, Any]:
    """The parts and their digests, and how many bytes each compressed chunk of the archive has."""

    def compressed(offset: int) -> bytes:
        with tar.open("rb") as file:
            file.seek(offset)
            return lzma.compress(file.read(CHUNK_BYTES), filters=_XZ)

    offsets = range(0, tar.stat().st_size, CHUNK_BYTES)
    chunks, parts, waiting = [], [], b""

    def write(part: bytes) -> None:
        name = f"part-{len(parts) + 1:02}"
        (kit / name).write_bytes(part)
        parts.append({"name": name, "bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as threads:
        for chunk in threads.map(compressed, offsets):
            chunks.append(len(chunk))
            waiting += chunk
            while len(waiting) > part_bytes:
                write(waiting[:part_bytes])
                waiting = waiting[part_bytes:]
    write(waiting)
    return {"parts": parts, "chunks": chunks, "chunk_bytes": CHUNK_BYTES}


def _uv(*arguments: object) -> None:
    """Run uv, which says itself what is wrong."""
    if code := subprocess.run([sys.executable, "-m", "uv", "--quiet", *map(str, arguments)], check=False).returncode:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
