"""`kill -9` at each kind of write: before and after every open, fsync, rename..., in every kind of stage.

Run: python tests/campaigns/placed_kills.py --workspace workspace/placed [--per-stage 24] [--csv placed_kills.csv]
Tiny: the same with --only sft --per-stage 4
More of some subjects: --per-stage 6 --faults sft=40 --faults report=30
One fault again: --fault "rl before rename 3"
A disk that is full from a call on, instead of kills: --full
The table of a CSV: --table --csv tests/campaigns/placed_kills.csv
In a fixed selection that a seed draws: --only sft --only evaluate --sample 6 --seed 1

A library that is loaded before all others (`fault_shim.c`, built with gcc at the start) counts the calls of a process
group that change files of the workspace, and kills the group at a chosen one: before it, after it, or when half of a
write is out. A dry pass counts the calls of a subject. Then faults are spread over them, and each is one trial: the
subject is killed there, started again, and compared with the undisturbed run. Exit code 1 when anything differed from
what is promised.

Stages are forked from this process, which has loaded their libraries, so that a trial takes seconds. `damaged` is a
finished stage that is made again from scratch; `evaluate_paid` and `synthesize_paid` ask an endpoint, which counts its
answers. `run`, `luffy_run`, `gc`, `grid` and `compare` are the pipeline and the commands, and are killed at writes of
their own processes.

Not covered: the processes of a Ray cluster (`random_kills.py --ray`), `luffy serve`, and writes that the C library
makes by itself.
"""

import argparse
import csv
import itertools
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from fault_points import CALLS, MOMENTS, Fault, Moment, Shim, load_shim, place_faults
from fault_subjects import Subject, prepare_subjects
from paying_subjects import PAYING_KINDS, paying_subjects

from luffy.config import STAGE_KINDS
from luffy.errors import EXIT_NO_SPACE, EXIT_OK, EXIT_USER_ERROR

CSV = "placed_kills.csv"
KINDS = (*STAGE_KINDS, "damaged", *PAYING_KINDS, "run", "gc", "luffy_run", "grid", "compare")


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault, and what came of it."""

    kind: str
    call: str
    number: int
    of: int
    """Calls of this kind in the undisturbed run."""
    moment: str
    found: str
    """What the kill left: the newest checkpoint, a finished stage, nothing."""
    exit_code: int
    """Of the same command again."""
    equal: bool
    repeated: bool
    """Whether finished work was done again."""
    orphans: int
    problems: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.equal and not (self.exit_code or self.repeated or self.orphans or self.problems)


def try_fault(subject: Subject, shim: Shim, fault: Fault, of: int) -> Trial | None:
    """One trial; None where the run came to its end before the call."""
    began = time.monotonic()
    subject.reset()
    said = subject.log.stat().st_size
    code = subject.run(shim, fault)
    if not shim.has_fired:
        return None
    unclear = full_disk_problems(code, subject.log.read_bytes()[said:].decode()) if fault.moment == "full" else []
    orphans = subject.end_orphans()
    found = subject.state()
    code = subject.run(shim, None)
    problems = unclear + subject.problems()
    return Trial(
        kind=subject.kind,
        call=fault.call,
        number=fault.number,
        of=of,
        moment=fault.moment,
        found=found,
        exit_code=code,
        equal=problems == unclear,
        repeated=subject.has_repeated(found),
        orphans=orphans + subject.end_orphans(),
        problems="; ".join(problems)[:500],
        seconds=round(time.monotonic() - began, 1),
    )


def full_disk_problems(code: int, said: str) -> list[str]:
    """What is wrong with how a program ended on a full disk: in one line and as a mistake of the user's is promised."""
    if code == EXIT_OK:
        return []  # what could not be written was not needed
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    found = [] if code in (EXIT_USER_ERROR, EXIT_NO_SPACE) else [f"exit code {code} on a full disk"]
    if len(lines) != 1 or not re.search("no space left", lines[0], re.I):
        found.append(f"said of the full disk: {lines or said.splitlines()[-1:]}")
    return found + (["a traceback"] if "Traceback" in said else [])


def count_calls(subject: Subject, shim: Shim) -> dict[str, int]:
    """The calls of an undisturbed run, which also has to equal the reference."""
    subject.reset()
    code = subject.run(shim, None)
    counts = shim.counts()
    if code or subject.problems():
        sys.exit(f"{subject.kind}: the undisturbed run failed: exit code {code}, {subject.problems()}")
    return {call: counts[call] for call in CALLS}


def restore(subject: Subject, shim: Shim) -> None:
    """After a bad trial: what the other subjects need of this one is made again."""
    subject.reset()
    code = subject.run(shim, None)
    if code or subject.problems():
        sys.exit(f"{subject.kind}: not to be restored: exit code {code}, {subject.problems()}; see {subject.log}")


def shares(options: argparse.Namespace) -> dict[str, int]:
    """The number of faults of each kind of subject."""
    chosen = options.only or [kind for kind in KINDS if not options.fault or kind in dict(options.fault)]
    given = dict(options.faults)
    return {kind: given.get(kind, options.per_stage) for kind in KINDS if kind in chosen}


def read_share(text: str) -> tuple[str, int]:
    """`sft=40`."""
    kind, _, number = text.partition("=")
    if kind not in KINDS:
        raise argparse.ArgumentTypeError(f"{kind!r} is none of {', '.join(KINDS)}")
    return kind, int(number)


def read_fault(text: str) -> tuple[str, Fault]:
    """`rl before rename 3`: the words of a row of the CSV and of a line of the log."""
    match text.split():
        case [kind, moment, call, number] if kind in KINDS and moment in MOMENTS and call in CALLS:
            return kind, Fault(call, int(number), moment)
    raise argparse.ArgumentTypeError(f"{text!r} is not KIND MOMENT CALL NUMBER, as in 'rl before rename 3'")


def show(trial: Trial) -> None:
    where = f"{trial.moment} {trial.call} {trial.number} of {trial.of}"
    verdict = "good" if trial.is_good else f"BAD {trial.problems} exit {trial.exit_code} repeated {trial.repeated}"
    say(f"{time.strftime('%H:%M:%S')} {trial.kind}: {where}: {trial.found}: {verdict} ({trial.seconds:.1f} s)")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_trials(path: Path) -> list[Trial]:
    """What an earlier, interrupted campaign wrote to the CSV."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Trial(
                **{
                    **row,
                    "number": int(row["number"]),
                    "of": int(row["of"]),
                    "exit_code": int(row["exit_code"]),
                    "equal": row["equal"] == "True",
                    "repeated": row["repeated"] == "True",
                    "orphans": int(row["orphans"]),
                    "seconds": float(row["seconds"]),
                }
            )
            for row in csv.DictReader(file)
        ]


def write_csv(path: Path, trials: Iterable[Trial]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Trial)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(trial) for trial in trials)


def table(trials: Sequence[Trial]) -> str:
    """Markdown: trials by kind of stage, by call, and by moment."""
    moments = [moment for moment in MOMENTS if any(trial.moment == moment for trial in trials)]
    lines = ["| kind | " + " | ".join((*CALLS, *moments)) + " | all | bad |"]
    lines.append("|---|" + "---|" * (len(CALLS) + len(moments) + 2))
    for kind in [kind for kind in KINDS if any(trial.kind == kind for trial in trials)]:
        lines.append(_row(f"`{kind}`", [trial for trial in trials if trial.kind == kind], moments))
    return "\n".join([*lines, _row("all", trials, moments)])


def _row(title: str, trials: Sequence[Trial], moments: Sequence[Moment]) -> str:
    calls, times = Counter(trial.call for trial in trials), Counter(trial.moment for trial in trials)
    cells = [*(calls[call] for call in CALLS), *(times[moment] for moment in moments)]
    shown = " | ".join(str(cell or "") for cell in cells)
    return f"| {title} | {shown} | {len(trials)} | {sum(not trial.is_good for trial in trials)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, help="for the workspaces and the built library")
    parser.add_argument("--table", action="store_true", help="only print the table of the CSV")
    parser.add_argument("--only", action="append", choices=KINDS, help="may be repeated")
    parser.add_argument("--per-stage", type=int, default=24, metavar="N", help="faults of each subject")
    parser.add_argument("--faults", action="append", default=[], type=read_share, metavar="KIND=N", help="of this one")
    parser.add_argument("--fault", action="append", default=[], type=read_fault, metavar="F", help="only this one")
    parser.add_argument("--full", action="store_true", help="the disk fills up, instead of kills")
    parser.add_argument("--sample", type=int, metavar="N", help="only so many of the faults, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--csv", type=Path, default=Path(CSV), help="a row for each fault; an existing one is continued"
    )
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no trial after so many")
    options = parser.parse_args(arguments)
    if options.table:
        say(table(read_trials(options.csv)))
        return 0
    if options.workspace is None:
        parser.error("--workspace is missing")
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Run the campaign, or what is left of it."""
    began, numbers = time.monotonic(), shares(options)
    folder = options.workspace.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    shim = load_shim(folder / "shim", folder / "roots")
    trials = read_trials(options.csv)
    done = {(trial.kind, trial.call, trial.number, trial.moment) for trial in trials}
    waiting = []
    places = folder / "roots", folder / "kept"
    paying = paying_subjects(places[0] / "paying", places[1], list(numbers), shim)
    for subject in itertools.chain(prepare_subjects(*places, list(numbers), shim), paying):
        counts = count_calls(subject, shim)
        say(f"{subject.kind}: {', '.join(f'{number} {call}' for call, number in counts.items() if number)}")
        own = [fault for kind, fault in options.fault if kind == subject.kind]
        faults = own if options.fault else place_faults(counts, numbers[subject.kind], full=options.full)
        waiting += [(subject, fault, counts[fault.call]) for fault in faults]
    if missing := set(numbers) - {subject.kind for subject, _, _ in waiting}:
        sys.exit(f"no subject for {', '.join(sorted(missing))}; add one to fault_subjects.py")
    # In no order, so that a campaign that is cut short has covered all of them.
    random.Random(options.seed).shuffle(waiting)
    for subject, fault, of in waiting[: options.sample]:
        is_done = (subject.kind, fault.call, fault.number, fault.moment) in done
        if is_done or time.monotonic() - began > options.minutes * 60:
            continue
        trial = try_fault(subject, shim, fault, of)
        if trial is not None:
            trials.append(trial)
            show(trial)
            write_csv(options.csv, trials)
            if not trial.is_good:
                restore(subject, shim)
    say(f"\n{table(trials)}")
    return 1 if not all(trial.is_good for trial in trials) else 0


if __name__ == "__main__":
    sys.exit(main())
