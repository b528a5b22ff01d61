import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luffy.pipeline.identity import Identity, IdentityRecord, read_identity, write_identity


def keys(experiment):
    return {name: identity.key for name, identity in experiment.identities.items()}


def changed(before, after):
    return {name for name in before if before[name] != after[name]}


def test_keys_are_the_same_every_time(opened):
    assert keys(opened()) == keys(opened())
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys(opened()).values())


EVALUATIONS = {"evaluate_base", "evaluate_sft", "evaluate_rl", "report"}
FROM_SFT = {"sft", "rl", "evaluate_sft", "evaluate_rl", "report"}
FROM_RL = {"rl", "evaluate_rl", "report"}
LORA = "model.lora={rank: 4, alpha: 8}"


@pytest.mark.parametrize(
    ("before", "override", "stages"),
    [
        ((), "evaluation.max_response_tokens=16", EVALUATIONS),
        ((), "rl.steps=7", FROM_RL),
        ((), "sft.epochs=3", FROM_SFT),
        ((), "execution.grader_workers=3", {"report"}),
        ((), "difficulty={}", FROM_RL),  # besides its own stage
        # An adapter changes what is trained with it and not what it starts from.
        ((), LORA, FROM_SFT),
        ((LORA,), "model.lora.rank=8", FROM_SFT),
        ((LORA,), "model.lora.targets=[q_proj]", FROM_SFT),
        ((LORA,), "model.lora=null", FROM_SFT),
        (("difficulty={}",), "difficulty.max_pass_rate=0.8", {"difficulty"} | FROM_RL),
        (("difficulty={}",), "difficulty.policy=sft", {"difficulty"} | FROM_RL),
        (("difficulty={}",), "rl.temperature=0.9", {"difficulty"} | FROM_RL),
        (("difficulty={}",), "difficulty.temperature=1.0", {"report"}),
        (("difficulty={}",), "sft.epochs=3", FROM_SFT),
    ],
)
def test_a_setting_changes_the_keys_of_what_depends_on_it(opened, before, override, stages):
    assert changed(keys(opened(*before)), keys(opened(*before, override))) == stages


JUDGE = "kind: judge, url: 'http://judge:8000/v1', model: m"
GRADED = {"prepare_data", "base", "sft", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl", "report"}


@pytest.mark.parametrize(
    ("setting", "stages"),
    [
        ("parallel: 3", {"report"}),
        ("api_key_variable: JUDGE_KEY", {"report"}),
        ("max_tokens: 64", GRADED),
        ("url: 'http://other:8000/v1'", GRADED),
    ],
)
@pytest.mark.parametrize("form", ["{{{}}}", "{{kind: any, of: [math, {{{}}}]}}"], ids=["alone", "within another"])
def test_a_judges_rate_and_api_key_change_only_the_key_of_the_report(opened, form, setting, stages):
    other = JUDGE.replace("url: 'http://judge:8000/v1'", setting) if "url" in setting else f"{JUDGE}, {setting}"
    before, after = (opened(f"grading.kind={form.format(judge)}") for judge in (JUDGE, other))
    assert changed(keys(before), keys(after)) == stages
    node = next(node for node in after.nodes if node.name == "evaluate_rl")
    assert setting.split(":")[0] in json.dumps(node.settings.model_dump(mode="json"))


def test_code_changes_every_key(opened):
    assert changed(keys(opened()), keys(opened(code={"module": "2"}))) == set(keys(opened()))


def test_the_order_of_named_entries_counts():
    one = Identity("evaluate", {"decodings": {"a": 1, "b": 2}}, {}, {}, {})
    two = Identity("evaluate", {"decodings": {"b": 2, "a": 1}}, {}, {}, {})
    assert one.key != two.key


@given(st.dictionaries(st.text(), st.text()))
def test_the_order_of_upstream_and_code_does_not_count(entries):
    backwards = dict(reversed(entries.items()))
    assert Identity("sft", {}, entries, entries, {}).key == Identity("sft", {}, backwards, backwards, {}).key


BY_STEPS = ("sft.epochs=null", "sft.optimizer.schedule={kind: constant}", "sft.steps=4")


@pytest.mark.parametrize(
    ("stage", "short", "longer", "other", "lengths"),
    [
        ("rl", (), "rl.steps=60", "rl.temperature=0.9", [6, 60]),
        ("sft", BY_STEPS, "sft.steps=8", "sft.optimizer.lr=0.1", [4, 8]),
    ],
)
def test_runs_of_different_length_share_a_series(opened, stage, short, longer, other, lengths):
    alike = [opened(*short, *more).identities[stage] for more in ((), (longer,))]
    assert [identity.length for identity in alike] == lengths
    assert alike[0].series == alike[1].series is not None
    assert opened(*short, other).identities[stage].series not in (alike[0].series, None)


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        ("sft", ()),  # so many epochs
        ("sft", (*BY_STEPS, "sft.optimizer.schedule.kind=linear")),
        ("sft", (*BY_STEPS, "sft.max_tokens=99")),
        ("rl", ("rl.optimizer.schedule.kind=cosine",)),
    ],
)
def test_no_series_where_a_step_depends_on_the_length(opened, stage, overrides):
    assert opened(*overrides).identities[stage].series is None


def test_a_record_is_read_as_written_and_a_damaged_one_explains_nothing(tmp_path, opened):
    identity = opened().identities["rl"]
    record = IdentityRecord(identity.key, "rl", identity, {"data": "abc"}, "smoke", "0123")
    write_identity(tmp_path, record)
    assert read_identity(tmp_path) == record
    assert read_identity(tmp_path).identity.key == identity.key
    (tmp_path / "identity.json").write_text('{"key": ')
    assert read_identity(tmp_path) is None
