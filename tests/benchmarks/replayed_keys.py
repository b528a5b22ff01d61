"""How many of the package's last commits change the keys of stages: under the ledger, and under the rule before it.

Run: python tests/benchmarks/replayed_keys.py [COMMITS, 100 by default]

Writes `replayed_keys.csv`, a row for each commit that touched `luffy/` (no merges), and prints how many change a key.
Each commit and its parent are checked out into a folder of their own, where their own code computes the settings and
the hashes of rooms of the stages of five shipped experiments. By kind of stage, without what comes from earlier ones:

- `before`: under the rule before the ledger, all settings count with their defaults, and all rooms by their hashes.
- `after`: under the ledger of the commit, rooms that were edited and not stamped included.

Commits from before the ledger are counted as if their authors had stamped: a kind's revision is raised where a golden
output of it changes, in that commit or in one of tests alone that follows it, and a field that is on one side only is
one with a default. So for them `after` says what the rule would have cost, not that each refactoring was one; a kind
without golden outputs in that time cannot show that its results changed. `difficulty` has the rooms of `sample`.
"""

import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from measuring import ROOT, numbers, show

RESULT = Path(__file__).with_suffix(".csv")
GOLDEN = "tests/integration/golden_outputs.json"
LEDGER = "luffy/pipeline/ledger.json"
KINDS = ("prepare_data", "base", "sample", "sft", "rl", "evaluate", "report")
WORDS = {"data": "prepare_data", "evaluation": "evaluate"}
"""First word of a golden output to the kind of stage that makes it, where that is another word."""
PROBE = """
import json, sys
from pathlib import Path
from luffy.config import load_experiment
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.identity import code_identity
from luffy.pipeline.workspace import Workspace
found = {}
for name in ("arithmetic", "expert_iteration", "luffy_qwen2.5_math_1.5b_1gpu", "own_data", "tools"):
    experiment = open_experiment(load_experiment(name), Workspace(Path("workspace")))
    for node in experiment.nodes:
        identity = experiment.identities[node.name]
        found[f"{name} {node.name}"] = {
            "kind": node.stage, "settings": identity.settings, "keyed": getattr(identity, "keyed", None),
            "code": identity.code, "rooms": code_identity(node.kind.rooms_of(node.settings)),
        }
json.dump(found, sys.stdout)
"""
Stages = Mapping[str, Mapping[str, Any]]
"""Experiment and stage to the kind of stage and what its key is made of."""


def git(*command: str, folder: Path = ROOT) -> str:
    return subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def file_of(commit: str, path: str) -> Any:
    """A JSON file as it was at a commit; empty where it was not there yet."""
    has = git("ls-tree", "--name-only", commit, path)
    return json.loads(git("show", f"{commit}:{path}")) if has else {}


def stages_of(commit: str, checkout: Path) -> Stages:
    """What the commit's own code says; the checkout is left there."""
    git("checkout", "--quiet", "--force", commit, folder=checkout)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Every value in nested settings, by its place."""
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from leaves(each, f"{path}.{name}")
    else:
        yield path, value


def changed_settings(old: object, new: object) -> bool:
    """Whether a field that is on both sides has another value."""
    before = dict(leaves(old))
    return any(path in before and before[path] != value for path, value in leaves(new))


def changed_golden(commit: str, parent: str) -> set[str]:
    """The kinds of which a golden output is another one than in the parent."""
    old, kinds = file_of(parent, GOLDEN), set()
    for machine, chains in file_of(commit, GOLDEN).items():
        for chain, outputs in chains.items():
            before = old.get(machine, {}).get(chain, {})
            words = (name.split()[0] for name, digest in outputs.items() if before.get(name, digest) != digest)
            kinds |= {WORDS.get(word, word) for word in words}
    return kinds


def kinds_that_differ(old: Stages, new: Stages, parts: tuple[str, ...]) -> set[str]:
    """The kinds of stages that both have, and that differ in one of these parts."""
    both = new.keys() & old.keys()
    return {new[name]["kind"] for name in both if any(new[name][part] != old[name][part] for part in parts)}


def replay(commit: str, known: dict[str, Stages], checkout: Path) -> dict[str, Any]:
    """One row of the result, with sets of kinds."""
    parent = git("rev-parse", f"{commit}^")
    old, new = (known.setdefault(each, known.get(each) or stages_of(each, checkout)) for each in (parent, commit))
    golden, has_ledger = changed_golden(commit, parent), bool(file_of(parent, LEDGER))
    after = kinds_that_differ(old, new, ("keyed", "code")) if has_ledger else set(golden)
    if not has_ledger:
        same = new.keys() & old.keys()
        after |= {new[name]["kind"] for name in same if changed_settings(old[name]["settings"], new[name]["settings"])}
    return {
        "commit": commit[:8],
        "subject": git("log", "-1", "--format=%s", commit),
        "ledger": "yes" if has_ledger else "no",
        "golden": golden,
        "before": kinds_that_differ(old, new, ("settings", "rooms")),
        "after": after,
    }


def main() -> None:
    """Replay the commits, oldest first, and print the shares of those that change a key."""
    [count] = numbers(100)
    commits = git("log", "--no-merges", f"-{count}", "--format=%H", "--", "luffy").splitlines()[::-1]
    rows: list[dict[str, Any]] = []
    known: dict[str, Stages] = {}
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder, "checkout")
        git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(checkout))
        for commit in commits:
            rows.append(replay(commit, known, checkout))
            print(f"{len(rows)}/{count}", rows[-1]["commit"], rows[-1]["subject"][:90], flush=True)
    of_tests = git("log", "--no-merges", "--reverse", "--format=%H", f"{commits[0]}..", "--", GOLDEN).splitlines()
    order = git("log", "--no-merges", "--reverse", "--format=%H", f"{commits[0]}^..").splitlines()
    for commit in set(of_tests).difference(commits):
        for kind in changed_golden(commit, f"{commit}^"):
            made_it = [row for row in rows if kind in row["before"] and is_before(row["commit"], commit, order)]
            made_it[-1]["golden"].add(kind)
            made_it[-1]["after"].add(kind)
    with RESULT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow(" ".join(sorted(value)) if isinstance(value, set) else value for value in row.values())
    for title, words in (("all", ("no", "yes")), ("before the ledger", ("no",)), ("since the ledger", ("yes",))):
        some = [row for row in rows if row["ledger"] in words]
        table = [[kind, *(sum(kind in row[rule] for row in some) for rule in ("before", "after"))] for kind in KINDS]
        table.append(["any kind", *(sum(bool(row[rule]) for row in some) for rule in ("before", "after"))])
        show(["kind of stage", "before", "after"], table, f"{title}: those of {len(some)} commits that change a key")
    kept = [row["commit"] for row in rows if row["golden"] - row["after"]]
    print("a golden output changed and the key did not:", ", ".join(kept) or "nowhere")


def is_before(short: str, commit: str, order: list[str]) -> bool:
    """Whether a commit, by the beginning of its name, is earlier in the history."""
    return next(number for number, each in enumerate(order) if each.startswith(short)) < order.index(commit)


if __name__ == "__main__":
    main()
