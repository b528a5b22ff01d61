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
from luffy.pipeline.identity import ASKING, LEDGER, REVISION, Identity, KeyLedger, code_identity, code_of
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


BELOW = {"kind": "below", "rate": 0.5}
LEFT_OUT = {"Below": {"rate": 0.5}, "Section": {"size": 4, "is_on": True, "below": {"kind": "below"}, "named": {}}}


def dumped(section, left_out=LEFT_OUT):
    return section.model_dump(mode="json", context=for_key(left_out))


def test_a_field_at_the_value_of_the_ledger_is_left_out_and_any_other_value_counts():
    assert dumped(Section(steps=2, size=4, note="x", below=Below(rate=0.5))) == {"steps": 2}
    assert dumped(Section(steps=2, size=5)) == {"size": 5, "steps": 2}
    assert dumped(Section(steps=2, below=Below(rate=0.1))) == {"below": {**BELOW, "rate": 0.1}, "steps": 2}
    named = {"b": Below(), "a": Below(rate=1.0)}
    assert list(dumped(Section(steps=2, named=named))["named"]) == ["b", "a"], "a user's mapping keeps its order"
    found = dumped(Section(steps=2), {"Section": {"is_on": 1, "size": 4.0}})
    expected = {"below": BELOW, "is_on": True, "named": {}, "size": 4, "steps": 2}
    assert json.dumps(found) == json.dumps(expected), "1 is not true"


def test_a_new_field_counts_until_it_is_stamped_and_a_changed_default_for_those_who_relied_on_it():
    class Section(StrictModel):
        steps: int
        size: int = 8  # was 4
        is_new: bool = False

    before = {"Section": {"size": 4}}
    assert dumped(Section(steps=2, size=4), before) == {"is_new": False, "steps": 2}, "written down before"
    entries = dict(stamp.defaults(Section, before))
    assert entries == {"size": 8, "is_new": False}
    stamped = {"Section": {**entries, "size": 4}}
    assert dumped(Section(steps=2, size=4), stamped) == {"steps": 2}
    assert dumped(Section(steps=2), stamped) == {"size": 8, "steps": 2}


def test_stamped_code_is_its_revision_and_an_edited_room_counts_until_it_is_taken_back(monkeypatch):
    rooms = STAGE_KINDS["sft"].rooms_of(None)
    hashes = code_identity(rooms)
    for stamped, counted in ((hashes, {}), ({**hashes, "training": "0f"}, {"training": hashes["training"]})):
        monkeypatch.setattr(identity, "read_ledger", lambda stamped=stamped: KeyLedger({"sft": 3}, stamped, {}))
        assert code_of("sft", rooms) == {REVISION: "3", **counted}
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
    written = opened("rl.temperature=1.0", "rl.passes=1", "rl.max_staleness=0").identities
    assert {name: found.key for name, found in written.items()} == {
        name: found.key for name, found in opened().identities.items()
    }


@pytest.mark.parametrize("name", stamp.SHIPPED)
def test_a_key_has_no_field_that_the_ledger_leaves_out_and_a_person_sees_all(name):
    settings = [node.settings for node in build_graph(load_experiment(name))]
    for each in (each for each in settings if not isinstance(each, ReportSettings)):
        shown, kept = (dict(flatten(found(each))) for found in (identity.identifying, identity.keyed))
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
    machine, before = next(iter(committed["golden"]["rl"].items()))
    golden = {**committed["golden"], "rl": {machine: {**before, "methods: rl luffy": "0" * 16}}}
    new, complaints = stamp.stamped({**committed, "golden": golden}, {"rl"} if revised else set())
    said = [line for line in complaints if "golden" in line]
    line = "golden outputs of rl are others now (methods: rl luffy); its results are: make stamp REVISE=rl"
    assert said == ([] if revised else [line])
    assert new["revisions"]["rl"] == committed["revisions"]["rl"] + revised


def test_an_entry_never_changes_a_field_that_is_gone_is_retired_and_its_name_may_not_return(committed):
    left_out = {**committed["left_out"]["RLConfig"], "old": 1, "temperature": 0.7}
    new, _ = stamp.stamped({**committed, "left_out": {**committed["left_out"], "RLConfig": left_out}}, set())
    assert "RLConfig.old" in new["retired"] and "old" not in new["left_out"]["RLConfig"]
    assert new["left_out"]["RLConfig"]["temperature"] == 0.7
    _, complaints = stamp.stamped({**committed, "retired": ["RLConfig.temperature"]}, set())
    assert complaints[0].startswith("RLConfig.temperature was the name of another field")


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
