"""Whether a stage gives the same bits on other CPUs, which QEMU emulates instruction by instruction.

Run: python tests/benchmarks/other_cpus.py [--cpus Haswell Skylake-Server EPYC] [--overrides base.steps=20 ...]

Needs `qemu-x86_64` (Debian's package qemu-user). The base stage of the smoke task is made on this machine's own CPU and
on each emulated one, with `execution.cpu_instructions: native` and `avx2`; printed is the hash of the trained weights.
QEMU 7.2 has no AVX-512, so an emulated Skylake offers AVX2 at most. An emulated stage takes some minutes, most of them
to load the libraries.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import ROOT, environment_without_server, show

OWN = "this machine"
INSTRUCTIONS = ("native", "avx2")
TIMEOUT_S = 3600.0


def made(workspace: Path, instructions: str, overrides: list[str]) -> Path:
    """The directory of the base stage, made on this machine."""
    settings = ["stages=[prepare_data, base]", f"execution.cpu_instructions={instructions}", *overrides]
    command = [sys.executable, "-m", "luffy", "run", "smoke", *settings, "--workspace", str(workspace)]
    run(command)
    (directory,) = (workspace / "stages" / "base").iterdir()
    return directory


def run(command: list[str]) -> None:
    """Run a command from the checkout; its output is shown where it fails."""
    env = environment_without_server()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        sys.exit(
            f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def again(directory: Path, cpu: str, out: Path) -> Path:
    """The same stage on an emulated CPU."""
    program = [sys.executable, "-m", "luffy.stages.base", "--config", str(directory / "config.yaml"), "--out", str(out)]
    run(["qemu-x86_64", "-cpu", cpu, *program])
    return out


def weights_of(directory: Path) -> str:
    """The first digits of the hash of the trained weights."""
    return hashlib.sha256((directory / "model" / "model.safetensors").read_bytes()).hexdigest()[:12]


def main() -> None:
    """Print a row for each CPU; the emulated stages run one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpus", nargs="+", default=["Haswell", "Skylake-Server", "EPYC"])
    parser.add_argument("--overrides", nargs="*", default=[])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        stages = {each: made(Path(folder) / each, each, arguments.overrides) for each in INSTRUCTIONS}
        rows = [(OWN, *(weights_of(stages[each]) for each in INSTRUCTIONS))]
        for cpu in arguments.cpus:
            found = [weights_of(again(stages[each], cpu, Path(folder) / f"{cpu}-{each}")) for each in INSTRUCTIONS]
            rows.append((cpu, *found))
    show(("CPU", *(f"cpu_instructions: {each}" for each in INSTRUCTIONS)), rows)


if __name__ == "__main__":
    main()
