"""Brings `luffy/pipeline/ledger.json` up to date with the code: what the keys of stages take for granted.

    make stamp                       no result is another one: every kind of stage keeps its revision, and so its keys
    make stamp REVISE="rl sft"       results of these kinds are: their keys change, and those of what is made from them
    python tests/stamp.py --check    one line for each thing that is not stamped, and exit code 1 (part of `make lint`)

A new field of the settings is entered with its default. An entry never changes: whoever relied on a default that is
another one now gets a new key, and whoever wrote it down keeps the old one. The name of a field that is gone is
retired, since its return would give old keys another meaning. A kind whose golden outputs are others than when it was
stamped (`tests/integration/golden_outputs.json`) needs a new revision.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic_core import to_jsonable_python

from luffy.config import STAGE_KINDS, load_experiment
from luffy.config.fields import is_model, members
from luffy.config.settings import SETTINGS, ReportSettings
from luffy.config.stage_kinds import ASKING_ROOMS, PLAYING_ROOMS
from luffy.config.strict import NOT_IDENTITY, StrictModel, for_key
from luffy.files import write_atomic
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.identity import ASKING, LEDGER, REVISION, code_identity, read_ledger
from luffy.pipeline.workspace import Workspace

GOLDEN = Path(__file__).with_name("integration") / "golden_outputs.json"
KEYS = Path(__file__).with_name("unit") / "pipeline" / "shipped_keys.json"
"""The keys of shipped experiments, so that a change of them is seen; it belongs into the changelog."""
SHIPPED = (
    *("arithmetic", "arithmetic_study", "expert_iteration", "guess_number", "luffy_qwen2.5_math_1.5b_1gpu", "own_data"),
    *("smoke_ray", "tools"),
)
_KIND_OF = {"data": "prepare_data", "evaluation": "evaluate"}
"""First word of a golden output to the kind of stage that makes it, where that is another word."""


def classes() -> list[type[StrictModel]]:
    """The classes of the settings that keys leave fields out of, each after those of its own fields."""
    found: dict[type[StrictModel], None] = {}
    begun = set[type[StrictModel]]()

    def enter(annotation: Any) -> None:
        for member in members(annotation):
            if not is_model(member):
                for below in get_args(member):
                    enter(below)
            elif issubclass(member, StrictModel) and member not in begun:
                begun.add(member)
                for field in member.model_fields.values():
                    enter(field.annotation)
                found[member] = None

    for settings in SETTINGS.values():
        if settings is not ReportSettings:  # a report shows all of its experiment
            enter(settings)
    return list(found)


def defaults(cls: type[StrictModel], left_out: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, object]]:
    """The fields of a class that have a default and change results, each with its default as a key would have it."""
    for name, field in cls.model_fields.items():
        is_tag = get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1
        if not (field.is_required() or is_tag or NOT_IDENTITY in field.metadata):
            default = field.get_default(call_default_factory=True, validated_data={})
            yield name, to_jsonable_python(default, context=for_key(left_out))


def golden() -> dict[str, dict[str, dict[str, str]]]:
    """Kind of stage to kind of machine to its golden outputs, by their names."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for machine, chains in json.loads(GOLDEN.read_text()).items():
        for chain, outputs in chains.items():
            for name, digest in outputs.items():
                word = name.split()[0]
                found.setdefault(_KIND_OF.get(word, word), {}).setdefault(machine, {})[f"{chain}: {name}"] = digest
    return found


def rooms() -> dict[str, str]:
    """All rooms that any kind declares, with the hashes of their code."""
    validated = (type("Validated", (), {"validation": True}), None)
    declared = {room for kind in STAGE_KINDS.values() for settings in validated for room in kind.rooms_of(settings)}
    return code_identity(sorted({*declared, *ASKING_ROOMS, *PLAYING_ROOMS}))


def stamped(ledger: Mapping[str, Any], revised: set[str]) -> tuple[dict[str, Any], list[str]]:
    """The ledger that the code needs, and what stands against keeping the revisions other than those of `revised`."""
    revisions = {kind: ledger["revisions"].get(kind, 0) + (kind in revised) for kind in (*STAGE_KINDS, ASKING)}
    left_out = {name: dict(fields) for name, fields in ledger["left_out"].items()}
    retired, complaints = set(ledger["retired"]), []
    for cls in classes():
        name = cls.__name__
        for field, default in defaults(cls, left_out):
            left_out.setdefault(name, {}).setdefault(field, default)
            if f"{name}.{field}" in retired:
                complaints.append(f"{name}.{field} was the name of another field; old keys would mean this one")
    fields = {cls.__name__: set(cls.model_fields) for cls in classes()}
    for name in list(left_out):
        gone = left_out[name].keys() - fields.get(name, set())
        retired |= {f"{name}.{field}" for field in gone}
        left_out[name] = {field: value for field, value in left_out[name].items() if field not in gone}
    now = golden()
    for kind, machines in now.items():
        before = ledger["golden"].get(kind, {})
        changed = [
            name
            for machine, outputs in machines.items()
            for name, digest in outputs.items()
            if before.get(machine, {}).get(name, digest) != digest
        ]
        if kind not in revised and changed:
            complaints.append(
                f"golden outputs of {kind} are others now ({changed[0]}); its results are: make stamp REVISE={kind}"
            )
    new = {"revisions": revisions, "rooms": rooms(), "golden": now, "retired": sorted(retired)}
    return {**new, "left_out": {name: each for name, each in sorted(left_out.items()) if each}}, complaints


def shipped_keys() -> dict[str, dict[str, str]]:
    """Experiment to stage to its key under stamped code."""
    revisions, found = read_ledger().revisions, {}
    for name in SHIPPED:
        config = load_experiment(name, ["execution.shared_cache=null"])
        experiment = open_experiment(
            config, Workspace(Path("workspace")), code=lambda kind, rooms: {REVISION: str(revisions[kind])}
        )
        found[name] = {node: identity.key for node, identity in experiment.identities.items()}
    return found


def main() -> int:
    """Write the ledger, or compare it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--revise", nargs="*", default=[], choices=[*STAGE_KINDS, ASKING])
    options = parser.parse_args()
    empty: dict[str, Any] = {"revisions": {}, "rooms": {}, "golden": {}, "retired": [], "left_out": {}}
    ledger = json.loads(LEDGER.read_text()) if LEDGER.is_file() else empty
    new, complaints = stamped(ledger, set(options.revise))
    if options.check:
        for part in new:
            if new[part] != ledger[part]:
                old = ledger[part]
                names = [name for name in (*new[part], *old) if name not in old or name not in new[part]]
                if isinstance(old, dict):
                    names += [name for name in old if name in new[part] and old[name] != new[part][name]]
                complaints.append(f"{LEDGER.name}: {part} not stamped ({', '.join(sorted(set(names)))}): make stamp")
    elif not complaints:
        write_atomic(LEDGER, json.dumps(new, indent=1, sort_keys=True) + "\n")
        write_atomic(KEYS, json.dumps(shipped_keys(), indent=1) + "\n")
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
