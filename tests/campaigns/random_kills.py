"""A hundred `kill -9` over a pipeline that learns: the flow, a stage or the Prefect server, at random moments.

Run: python tests/campaigns/random_kills.py --workspace workspace/kills [--kills 100] [--mean-s 35] [key=value ...]
Tiny: the same with --config exp_configs/smoke.yaml --kills 5 --mean-s 8
A Ray cluster: --ray --config exp_configs/smoke.yaml --kills 20 --mean-s 20 cluster=ray chain=rl ...

First an undisturbed run, the reference. Then chains: the same command over a new workspace, killed and started again
until it is done and compared with the reference; chain after chain until the kills are used up. Overrides that change
no result, as `execution.checkpoint.base_every=30`, spread the kills over more stages; give them from the start, since
the report shows them. Every kill is printed and written to a CSV in the workspace (`random_kills.csv` beside this file
is one); a campaign that was itself killed goes on where it was. About an hour and a half on two cores, in which the
code must not be edited: the keys of stages stand for it.
With --ray, ranks, engines, Ray's GCS, its raylet and the stage, which drives them, are killed. vLLM does not promise
the same tokens after that, so that only keys and steps are compared, and whether files have the digests recorded.
Exit code 1 when anything differed from what is promised.
"""

import argparse
import csv
import json
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from killing import (
    RAY_VICTIMS,
    VICTIMS,
    Attempt,
    Kill,
    Pipeline,
    Victim,
    differences,
    disturb,
    draws,
    promised,
    promised_steps,
)

CONFIG = "exp_configs/arithmetic.yaml"
Look = Callable[[Path], dict[str, object]]
CSV = "random_kills.csv"
_HEADER = ("kill", "chain", "attempt", "victim", "at_s", "stage", "exit_code", "to_end_s", "equal", "problems")


@dataclass(frozen=True)
class Finished:
    """A chain that has come to its end."""

    chain: int
    differences: list[str]
    """Against the reference; empty: everything but times is equal."""


class Record:
    """What the campaign has done so far: a file of JSON lines, so that it goes on after a kill of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.attempts: list[tuple[int, Attempt]] = []
        """With the number of their chain."""
        self.chains: dict[int, Finished] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            fields = json.loads(line)
            if "differences" in fields:
                self.chains[fields["chain"]] = Finished(**fields)
            else:
                self.attempts.append((fields.pop("chain"), _attempt(fields)))

    @property
    def num_kills(self) -> int:
        return sum(len(attempt.kills) for _, attempt in self.attempts)

    @property
    def has_open_chain(self) -> bool:
        return any(chain not in self.chains for chain, _ in self.attempts)

    @property
    def problems(self) -> list[str]:
        """All that ought not to have been."""
        found = [f"chain {chain}: {problem}" for chain, attempt in self.attempts for problem in attempt.problems]
        return found + [f"chain {n}: {line}" for n, chain in self.chains.items() for line in chain.differences]

    def attempts_of(self, chain: int) -> list[Attempt]:
        return [attempt for number, attempt in self.attempts if number == chain]

    def add_attempt(self, chain: int, attempt: Attempt) -> None:
        self.attempts.append((chain, attempt))
        self._append({"chain": chain, **asdict(attempt)})

    def add_chain(self, finished: Finished) -> None:
        self.chains[finished.chain] = finished
        self._append(asdict(finished))

    def rows(self) -> Iterable[tuple[object, ...]]:
        """A row a kill, under `_HEADER`."""
        number, attempts = 0, Counter[int]()
        for chain, attempt in self.attempts:
            attempts[chain] += 1
            done = self.chains.get(chain)
            equal = "" if done is None else "no" if done.differences else "yes"
            for kill in attempt.kills:
                number += 1
                ended = ("", "") if kill.to_end_s is None else (kill.exit_code, kill.to_end_s)
                problems = "; ".join(attempt.problems)
                yield (number, chain, attempts[chain], kill.victim, kill.at_s, kill.stage, *ended, equal, problems)

    def _append(self, fields: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def _attempt(fields: dict[str, object]) -> Attempt:
    kills = tuple(Kill(**kill) for kill in fields.pop("kills"))
    return Attempt(**{**fields, "kills": kills, "problems": tuple(fields["problems"])})


def make_reference(pipeline: Pipeline, look: Look) -> dict[str, object]:
    """What an undisturbed run comes to; made once."""
    kept = pipeline.workspace.with_suffix(".json")
    if not kept.exists():
        shutil.rmtree(pipeline.workspace, ignore_errors=True)  # what a killed campaign has left was disturbed
        attempt = disturb(pipeline, iter(()))
        if attempt.exit_code != 0 or attempt.problems:
            sys.exit(f"the undisturbed run failed: {attempt}")
        print(f"reference: {attempt.seconds:.0f} s", flush=True)
        kept.write_text(json.dumps(look(pipeline.workspace)))
    return json.loads(kept.read_text())


def run_chain(number: int, pipeline: Pipeline, record: Record, options: argparse.Namespace) -> None:
    """Kill and start again until the chain is done."""
    while not any(attempt.exit_code == 0 for attempt in record.attempts_of(number)):
        index = len(record.attempts_of(number))
        generator = random.Random(f"{options.seed} {number} {index}")
        left = options.kills - record.num_kills
        attempt = disturb(
            pipeline, islice(draws(generator, options.mean_s, victims_of(options)), left), options.patience_s
        )
        record.add_attempt(number, attempt)
        show(number, attempt, record)
        write_csv(pipeline.workspace.parent / CSV, record)
        if attempt.exit_code != 0 and not attempt.kills:
            sys.exit(f"chain {number} cannot be finished: {attempt.problems}")


def victims_of(options: argparse.Namespace) -> Sequence[Victim]:
    return RAY_VICTIMS if options.ray else VICTIMS


def compare(number: int, pipeline: Pipeline, expected: dict[str, object], look: Look) -> Finished:
    """Whether a finished chain is as promised."""
    found = json.loads(json.dumps(look(pipeline.workspace)))  # as the reference was
    finished = Finished(number, differences(found, expected))
    for line in finished.differences:
        print(f"  DIFFERS {line}", flush=True)
    return finished


def show(chain: int, attempt: Attempt, record: Record) -> None:
    first = record.num_kills - len(attempt.kills) + 1
    for number, kill in enumerate(attempt.kills, first):
        end = "went on" if kill.to_end_s is None else f"exit code {kill.exit_code} after {kill.to_end_s:.1f} s"
        where = kill.stage or "between stages"
        print(f"{_clock()} kill {number} (chain {chain}): {kill.victim} after {kill.at_s:.1f} s in {where}: {end}")
    if attempt.exit_code == 0:
        print(f"{_clock()} chain {chain} is done")
    for problem in attempt.problems:
        print(f"  PROBLEM {problem}")
    sys.stdout.flush()


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def write_csv(path: Path, record: Record) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([_HEADER, *record.rows()])


def summary(record: Record) -> str:
    """A Markdown table: kills by victim and by what was being made."""
    kills = [kill for _, attempt in record.attempts for kill in attempt.kills]
    stages = list(dict.fromkeys(kill.stage for kill in kills))
    victims = [name for name in dict.fromkeys((*VICTIMS, *RAY_VICTIMS)) if any(kill.victim == name for kill in kills)]
    lines = ["| being made | " + " | ".join(victims) + " |", "|---|" + "---|" * len(victims)]
    for stage in stages:
        counts = Counter(kill.victim for kill in kills if kill.stage == stage)
        lines.append(f"| {stage or 'between stages'} | " + " | ".join(str(counts[name]) for name in victims) + " |")
    equal = sum(not chain.differences for chain in record.chains.values())
    lines.append(f"\n{len(kills)} kills in {len(record.chains)} chains, {equal} of them equal to the undisturbed run; ")
    lines[-1] += f"{len(record.problems)} problems."
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, or what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--workspace", type=Path, required=True, help="for all its workspaces, and its own record")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--mean-s", type=float, default=35.0, help="mean time to a kill")
    parser.add_argument("--patience-s", type=float, default=3600.0, help="for a run that nothing kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ray", action="store_true", help="kill the processes of a Ray cluster")
    options = parser.parse_args(arguments)
    folder = options.workspace.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    overrides, look = tuple(options.overrides), promised_steps if options.ray else promised
    expected = make_reference(Pipeline(folder / "reference", options.config, overrides), look)
    record = Record(folder / "kills.jsonl")
    while record.num_kills < options.kills or record.has_open_chain:
        number = len(record.chains) + 1
        pipeline = Pipeline(folder / f"chain-{number}", options.config, overrides)
        run_chain(number, pipeline, record, options)
        record.add_chain(compare(number, pipeline, expected, look))
        write_csv(folder / CSV, record)
        if not record.chains[number].differences:  # else it is kept, to be looked at
            shutil.rmtree(pipeline.workspace)
    print(f"\n{summary(record)}")
    return 1 if record.problems else 0


if __name__ == "__main__":
    sys.exit(main())
