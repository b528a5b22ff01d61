"""What hundreds of runs in one workspace cost the commands that look through it.

Run: python tests/benchmarks/workspace_size.py [--runs 5 50 500] [--rounds 3]

Two smoke runs with different seeds are made, and copies of them fill the workspace up. Every copy has all of its stages
to itself, under keys and a run name of its own: nothing is shared, which is the worst case. A command is a process from
its start to its end, and its time the median over the rounds. The first column has the two real runs alone.
"""

import argparse
import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measuring import ROOT, environment_without_server, show

from luffy.pipeline.workspace import RUN_FILE

SEEDS = (1, 2)
COMMANDS = {
    "`luffy show`": ("show",),
    "`luffy plan`": ("plan", "smoke", "seed=1"),
    "`luffy gc`": ("gc",),
    "`luffy show --leaderboard`": ("show", "--leaderboard"),
}
TEXTS = (".json", ".jsonl", ".html", ".md", ".yaml", ".txt")


def luffy(workspace: Path, *arguments: str) -> float:
    """Seconds of one command. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "luffy", *arguments, "--workspace", str(workspace)]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=environment_without_server(), capture_output=True, check=True)
    return time.monotonic() - began


def add_copy(run: Path, number: int) -> None:
    """Copy a run and all of its stages, with a new key for each stage and a new name for the run."""
    stages = json.loads((run / RUN_FILE).read_text())["stages"].values()
    keys = {stage["key"]: secrets.token_hex(8) for stage in stages}
    for stage in stages:
        source = Path(stage["directory"])
        copy_tree(source, source.with_name(keys[stage["key"]]), keys)
    copy_tree(run, run.with_name(f"copy-{number}"), keys)


def copy_tree(source: Path, target: Path, renamed: dict[str, str]) -> None:
    """Copy a folder; in its texts and links the keys of `renamed` become its values, so that sizes of stages stay."""

    def replaced(text: str) -> str:
        for old, new in renamed.items():
            text = text.replace(old, new)
        return text

    shutil.copytree(source, target, symlinks=True)
    for path in target.rglob("*"):
        if path.is_symlink():
            place = replaced(str(path.readlink()))
            path.unlink()
            path.symlink_to(place)
        elif path.suffix in TEXTS:
            path.write_text(replaced(path.read_text()))


def timed(workspace: Path, rounds: int) -> dict[str, float]:
    """Median seconds of every command; the rounds go through all commands in turn."""
    times = [{name: luffy(workspace, *command) for name, command in COMMANDS.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in times) for name in COMMANDS}


def main() -> None:
    """Print a row for every command, a column for every number of runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[5, 50, 500])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "workspace"
        for seed in SEEDS:
            luffy(workspace, "run", "smoke", f"seed={seed}")
        originals = sorted((workspace / "runs").iterdir())
        columns = {len(originals): timed(workspace, given.rounds)}
        for number in sorted(given.runs):
            for count in range(max(columns), number):
                add_copy(originals[count % len(originals)], count)
            columns[number] = timed(workspace, given.rounds)
        stages = sum(len(list(kind.iterdir())) for kind in (workspace / "stages").iterdir())
    rows = [(name, *(f"{column[name]:.1f}" for column in columns.values())) for name in COMMANDS]
    show(("seconds with", *(f"{number} runs" for number in columns)), rows)
    print(f"{max(columns)} runs have {stages} stage directories")


if __name__ == "__main__":
    main()
