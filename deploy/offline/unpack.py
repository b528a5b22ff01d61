"""Make an environment of the parts beside this script, on a machine without a network.

    python3 unpack.py ENV

Needs the standard library alone. Where the kit was packed for what is here (`--present`, `--leave-out`), the
environment also sees the packages of the Python that runs this script, after its own.
"""

import argparse
import compileall
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import sys
import tarfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KIT = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path, help="a new folder, or the environment of another kit to add to")
    given = parser.parse_args()
    folder = given.environment.absolute()
    if wrong := _refusal(folder):
        print(f"error: {wrong}", file=sys.stderr)  # noqa: T201
        return 2
    manifest = json.loads((KIT / "manifest.json").read_text())
    if not folder.exists():
        venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{manifest['python']}" / "site-packages"
    _extract(manifest, folder)
    if manifest["beside"]:
        seen = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        lines = [f"import site; site.addsitedir({path!r})" for path in seen if path != str(packages)]
        (packages / "beside.pth").write_text("\n".join(lines))
    # Compiled now, by all cores, and not at the first import, by one.
    compileall.compile_dir(packages, quiet=2, workers=0)
    print(f"{folder}: activate it by `export PATH={folder}/bin:$PATH`, and try it by `luffy run smoke`")  # noqa: T201
    return 0


def _refusal(folder: Path) -> str | None:
    """Why the kit cannot be unpacked here; None if it can."""
    if not (KIT / "manifest.json").is_file():
        return f"{KIT / 'manifest.json'} is missing: copy it from the kit"
    manifest = json.loads((KIT / "manifest.json").read_text())
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != manifest["python"]:
        return f"the kit is for Python {manifest['python']}, this is {here}: start it with python{manifest['python']}"
    wanted = str(manifest["platform"])
    if not wanted.startswith((platform.machine(), "linux")):
        return f"the kit is for {wanted}, this machine is {platform.machine()}: pack it with --platform"
    glibc = re.search(r"manylinux_?(\d+)_(\d+)$", wanted)
    name, version = platform.libc_ver()
    if glibc and name == "glibc" and tuple(map(int, version.split("."))) < tuple(map(int, glibc.groups())):
        fitting = f"{platform.machine()}-manylinux_{version.replace('.', '_')}"
        return f"the kit is for {wanted}, this machine has glibc {version}: pack it with --platform {fitting}"
    if folder.exists() and not (folder / "pyvenv.cfg").exists():
        return f"{folder} exists and is no environment: name a new folder"
    for part in manifest["parts"]:
        path = KIT / part["name"]
        if not path.is_file():
            return f"{path} is missing ({len(manifest['parts'])} parts belong to this kit): copy it again"
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != part["sha256"]:
                return f"{path} is damaged ({path.stat().st_size} of {part['bytes']} bytes): copy it again"
    return None


def _extract(manifest: dict[str, Any], folder: Path) -> None:
    """Join the parts, decompress their chunks at once into an archive, and extract that into the environment."""
    packages = next((folder / "lib").glob("python3*/site-packages"))
    joined, tar = folder / "kit.tar.xz", folder / "kit.tar"
    with joined.open("wb") as to:
        for part in manifest["parts"]:
            with (KIT / part["name"]).open("rb") as source:
                shutil.copyfileobj(source, to, 1 << 20)
    tar.touch()

    def decompress(number: int) -> None:
        with joined.open("rb") as source, tar.open("r+b") as to:
            source.seek(sum(manifest["chunks"][:number]))
            to.seek(number * manifest["chunk_bytes"])
            to.write(lzma.decompress(source.read(manifest["chunks"][number])))

    with ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as threads:
        list(threads.map(decompress, range(len(manifest["chunks"]))))
    with tarfile.open(tar) as archive:
        # Refuses paths that lead out of the folder; Pythons before 3.11.4 have no such filter.
        archive.extractall(packages, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # noqa: S202
    joined.unlink()
    tar.unlink()
    # uv puts the programs beside the packages, and names the Python that packed them.
    for program in packages.glob("bin/*"):
        text = program.read_bytes()
        first, newline, rest = text.partition(b"\n")
        if first.startswith(b"#!") and b"python" in first:
            program.write_bytes(f"#!{folder}/bin/python".encode() + newline + rest)
        program.replace(folder / "bin" / program.name)


if __name__ == "__main__":
    sys.exit(main())
