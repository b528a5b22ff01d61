"""What a key takes for granted: code at its revision, and settings at the values that the ledger has for them."""

import json
from typing import Annotated, Literal, get_args

import pytest
import stamp
from pydantic import Field

from luffy.config import STAGE_KINDS, load_experiment
from luffy.config.fields import is_model, members
from luffy.config.settings import ReportSettings
from luffy.config.stage_kinds import ASKING_ROOMS
from luffy.config.strict import NOT_IDENTITY, StrictModel, for_key
from luffy.pipeline import identity
from luffy.pipeline.graph import build_graph
from luffy.pipeline.identity import (
    ASKING,
    LEDGER,
    REVISION,
    Identity,
    KeyLedger,
    code_identity,
    code_of,
    identifying,
    keyed,
)
from luffy.pipeline.plan import differences, flatten


class Below(StrictModel):
    kind: Literal["below"] = "below"
    rate: float = 0.5


class Section(StrictModel):
    steps: int
    size: int = 4
    is_on: bool = True
    below: Below = Below()
    named: dict[str, Below] = Field(default_factory=dict)
    note: Annotated[str, NOT_IDENTITY] = ""


LEFT_OUT = {
    "Below": {"rate": 0.5},
    "Section": {"size": 4, "is_on": True, "below": {"kind": "below"}, "named": {}},
}


def dumped(section, left_out=LEFT_OUT):
    return section.model_dump(mode="json", context=for_key(left_out))


@pytest.fixture
def ledger(monkeypatch):
    """Stands in for the package's own."""

    def use(**parts):
        given = KeyLedger(**{"revisions": {}, "rooms": {}, "left_out": {}, **parts})
        monkeypatch.setattr(identity, "read_ledger", lambda: given)

    return use


def test_a_field_at_the_value_of_the_ledger_is_left_out_and_any_other_value_counts():
    assert dumped(Section(steps=2, size=4, note="x", below=Below(rate=0.5))) == {"steps": 2}
    assert dumped(Section(steps=2, size=5)) == {"size": 5, "steps": 2}
    assert dumped(Section(steps=2, below=Below(rate=0.1))) == {"below": {"kind": "below", "rate": 0.1}, "steps": 2}
    named = {"b": Below(), "a": Below(rate=1.0)}
    assert list(dumped(Section(steps=2, named=named))["named"]) == ["b", "a"], "a user's mapping keeps its order"
    assert json.dumps(dumped(Section(steps=2), {"Section": {"is_on": 1, "size": 4.0}})) == json.dumps(
        {"below": {"kind": "below", "rate": 0.5}, "is_on": True, "named": {}, "size": 4, "steps": 2}
    ), "1 is not true"


def test_a_new_field_counts_until_it_is_stamped_and_then_changes_nothing():
    class Section(StrictModel):
        steps: int
        size: int = 4
        is_new: bool = False

    before = {"Section": {"size": 4}}
    assert dumped(Section(steps=2), before) == {"is_new": False, "steps": 2}
    entries = dict(stamp.defaults(Section, before))
    assert entries == {"size": 4, "is_new": False}
    assert dumped(Section(steps=2), {"Section": entries}) == {"steps": 2}


def test_a_changed_default_moves_the_keys_of_those_who_relied_on_it():
    class Section(StrictModel):
        steps: int
        size: int = 8  # was 4

    assert dumped(Section(steps=2), LEFT_OUT) == {"size": 8, "steps": 2}
    assert dumped(Section(steps=2, size=4), LEFT_OUT) == {"steps": 2}, "written down before"


def test_stamped_code_is_its_revision_and_an_edited_room_counts_until_it_is_taken_back(ledger):
    rooms = STAGE_KINDS["sft"].rooms_of(None)
    hashes = code_identity(rooms)
    ledger(revisions={"sft": 3}, rooms=hashes)
    assert code_of("sft", rooms) == {REVISION: "3"}
    ledger(revisions={"sft": 3}, rooms={**hashes, "training": "before the edit"})
    assert code_of("sft", rooms) == {REVISION: "3", "training": hashes["training"]}
    assert code_of("new_kind", rooms) == hashes


def test_a_plan_says_which_revision_or_room_is_another_one(opened):
    def said(before, after):
        one, two = (opened(code=code).identities["rl"] for code in (before, after))
        return list(differences(one, two, {}))[-1]

    stamped = {REVISION: "1"}
    assert said(stamped, {REVISION: "2"}) == "revision of rl 1 -> 2"
    assert said(stamped, {**stamped, "rl": "0f"}) == "code changed (rl)"
    assert said({"rl": "0e", "training": "0f"}, stamped) == "code changed (rl, training)", "by an older version"


def test_an_identity_of_a_version_without_the_ledger_is_read():
    fields = {"stage": "rl", "settings": {"rl": {"steps": 6}}, "upstream": {}, "code": {"rl": "0f"}, "files": {}}
    assert Identity(**fields, extendable=True).length == 6 and Identity(**fields).keyed == {}


def test_what_is_written_down_though_it_is_the_default_has_the_same_key(opened):
    plain = opened()
    every = (f"rl.{name}={value}" for name, value in (("temperature", 1.0), ("passes", 1), ("max_staleness", 0)))
    assert {name: found.key for name, found in opened(*every).identities.items()} == {
        name: found.key for name, found in plain.identities.items()
    }


@pytest.mark.parametrize("name", stamp.SHIPPED)
def test_a_key_has_no_field_that_the_ledger_leaves_out_and_a_person_sees_all(name):
    for node in build_graph(load_experiment(name)):
        if isinstance(node.settings, ReportSettings):
            continue
        shown, kept = (dict(flatten(found(node.settings))) for found in (identifying, keyed))
        assert len(kept) < len(shown)
        assert {path: value for path, value in kept.items() if path in shown and shown[path] != value} == {}


@pytest.fixture(scope="module")
def committed():
    return json.loads(LEDGER.read_text())


def test_every_kind_of_stage_has_a_revision_and_every_room_a_hash(committed):
    assert set(committed["revisions"]) == {*STAGE_KINDS, ASKING}
    rooms = {room for kind in STAGE_KINDS.values() for room in kind.rooms_of(None)}
    assert {*rooms, *ASKING_ROOMS} <= set(committed["rooms"])
    assert len({cls.__name__ for cls in stamp.classes()}) == len(stamp.classes()), "entries are by the class's name"


@pytest.mark.parametrize("revised", [False, True])
def test_other_golden_outputs_need_a_new_revision(committed, revised):
    machine = next(iter(committed["golden"]["rl"]))
    before = committed["golden"]["rl"][machine]
    golden = {**committed["golden"], "rl": {machine: {**before, "methods: rl luffy": "0" * 16}}}
    new, complaints = stamp.stamped({**committed, "golden": golden}, {"rl"} if revised else set())
    said = [line for line in complaints if "golden" in line]
    line = "golden outputs of rl are others now (methods: rl luffy); its results are: make stamp REVISE=rl"
    assert said == ([] if revised else [line])
    assert new["revisions"]["rl"] == committed["revisions"]["rl"] + revised


def test_a_field_that_is_gone_is_retired_and_its_name_may_not_return(committed):
    left_out = {**committed["left_out"], "RLConfig": {**committed["left_out"]["RLConfig"], "old": 1}}
    new, _ = stamp.stamped({**committed, "left_out": left_out}, set())
    assert "RLConfig.old" in new["retired"] and "old" not in new["left_out"]["RLConfig"]
    _, complaints = stamp.stamped({**committed, "retired": ["RLConfig.temperature"]}, set())
    assert complaints[0].startswith("RLConfig.temperature was the name of another field")


def test_an_entry_never_changes(committed):
    left_out = {**committed["left_out"], "RLConfig": {**committed["left_out"]["RLConfig"], "temperature": 0.7}}
    assert stamp.stamped({**committed, "left_out": left_out}, set())[0]["left_out"]["RLConfig"]["temperature"] == 0.7


def test_shipped_experiments_have_the_keys_that_they_had():
    """Of the stages' settings, files and revisions. Where they change on purpose, `make stamp` writes them."""
    assert stamp.shipped_keys() == json.loads(stamp.KEYS.read_text())


def unions(annotation):
    """The settings classes between which a field chooses, wherever in its type."""
    branches = members(annotation)
    yield [branch for branch in branches if is_model(branch)]
    for branch in branches:
        if not is_model(branch):
            yield from (found for below in get_args(branch) for found in unions(below))


def test_keys_tell_the_classes_of_a_union_apart_by_what_is_never_left_out(committed):
    def kept(cls):
        left_out = committed["left_out"].get(cls.__name__, {})
        return frozenset((name, str(cls.model_fields[name].annotation)) for name in cls.model_fields.keys() - left_out)

    annotations = [field.annotation for cls in stamp.classes() for field in cls.model_fields.values()]
    choices = [found for annotation in annotations for found in unions(annotation) if len(found) > 1]
    assert len(choices) > 10
    assert [found for found in choices if len({*map(kept, found)}) < len(found)] == []
