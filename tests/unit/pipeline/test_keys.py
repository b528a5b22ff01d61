"""Which edit moves the keys of which stages: settings, files outside of the workspace, the user's own code."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from synthetic.reward_models import reward_folder

from luffy.pipeline.identity import Identity, IdentityRecord, read_identity, write_identity

EVALUATIONS = {"evaluate_base", "evaluate_sft", "evaluate_rl"}
FROM_RL = {"rl", "evaluate_rl", "report"}
FROM_SFT = {"sft", "evaluate_sft"} | FROM_RL
EVERY = {"prepare_data", "base", "evaluate_base"} | FROM_SFT
LORA, MEASURED = "model.lora={rank: 4, alpha: 8}", "difficulty={}"
JUDGES = ("grading.kind={%s}", "grading.kind={kind: any, of: [math, {%s}]}")
JUDGE = "kind: judge, url: 'http://judge:8000/v1', model: m, "
MOVES = [  # what is set before, what is set in addition, and the stages whose keys it moves
    ((), "evaluation.max_response_tokens=16", EVALUATIONS | {"report"}),
    ((), "rl.steps=7", FROM_RL),
    ((), "sft.epochs=3", FROM_SFT),
    ((), "execution.grader_workers=3", {"report"}),
    ((), MEASURED, FROM_RL),  # besides its own stage
    # An adapter changes what is trained with it and not what it starts from.
    ((), LORA, FROM_SFT),
    ((LORA,), "model.lora.rank=8", FROM_SFT),
    ((LORA,), "model.lora=null", FROM_SFT),
    ((MEASURED,), "difficulty.max_pass_rate=0.8", {"difficulty"} | FROM_RL),
    ((MEASURED,), "stages=[prepare_data, base, sft, difficulty, rl, evaluate, report]", {"difficulty"} | FROM_RL),
    ((MEASURED,), "rl.temperature=0.9", {"difficulty"} | FROM_RL),
    ((MEASURED,), "difficulty.temperature=1.0", {"report"}),
    # Of a judge, alone or within another grader, neither its rate nor where its key is.
    *(((form % JUDGE,), form % f"{JUDGE}parallel: 3", {"report"}) for form in JUDGES),
    *(((form % JUDGE,), form % f"{JUDGE}api_key_variable: JUDGE_KEY", {"report"}) for form in JUDGES),
    *(((form % JUDGE,), form % f"{JUDGE}max_tokens: 64", EVERY) for form in JUDGES),
    *(((form % JUDGE,), form % JUDGE.replace("//judge", "//other"), EVERY) for form in JUDGES),
]


def keys(experiment):
    return {name: identity.key for name, identity in experiment.identities.items()}


def moved(before, after):
    return {name for name, key in keys(before).items() if keys(after)[name] != key}


def test_keys_are_the_same_every_time_and_all_move_with_the_code(opened):
    assert moved(opened(), opened()) == set()
    assert all(len(key) == 16 and int(key, 16) >= 0 for key in keys(opened()).values())
    assert moved(opened(), opened(code={"module": "2"})) == EVERY


@pytest.mark.parametrize(("before", "override", "stages"), MOVES)
def test_a_setting_moves_the_keys_of_what_depends_on_it(opened, before, override, stages):
    assert moved(opened(*before), opened(*before, override)) == stages


@given(st.dictionaries(st.text(), st.text(), min_size=2))
def test_the_order_of_upstream_and_code_does_not_count_and_that_of_named_entries_does(entries):
    backwards = dict(reversed(entries.items()))
    assert Identity("sft", {}, entries, entries, {}).key == Identity("sft", {}, backwards, backwards, {}).key
    one, two = (Identity("sft", {}, {}, {}, {}, keyed={"decodings": named}) for named in (entries, backwards))
    assert one.key != two.key


BY_STEPS = ("sft.epochs=null", "sft.optimizer.schedule={kind: constant}", "sft.steps=4")
SERIES = [
    ("rl", (), "rl.steps=60", "rl.temperature=0.9", [6, 60]),
    ("sft", BY_STEPS, "sft.steps=8", "sft.optimizer.lr=0.1", [4, 8]),
]


@pytest.mark.parametrize(("stage", "short", "longer", "other", "lengths"), SERIES)
def test_runs_of_different_length_share_a_series_unless_a_step_depends_on_it(
    opened, stage, short, longer, other, lengths
):
    alike = [opened(*short, *more).identities[stage] for more in ((), (longer,))]
    assert [identity.length for identity in alike] == lengths
    assert alike[0].series == alike[1].series is not None
    assert opened(*short, other).identities[stage].series not in (alike[0].series, None)
    assert opened(*short, f"{stage}.optimizer.schedule.kind=cosine").identities[stage].series is None
    assert opened().identities["sft"].series is None, "so many epochs"


def test_a_record_is_read_as_written_and_a_damaged_one_explains_nothing(tmp_path, opened):
    identity = opened().identities["rl"]
    record = IdentityRecord(identity.key, "rl", identity, {"data": "abc"}, "smoke", "0123")
    write_identity(tmp_path, record)
    assert read_identity(tmp_path) == record and read_identity(tmp_path).identity.key == identity.key
    (tmp_path / "identity.json").write_text('{"key": ')
    assert read_identity(tmp_path) is None


# ---- files outside of the workspace ----

CODE = (
    "import os\nimport os.path as there\na, (b, *c) = 1, (2, 3)\nd: int = 1\ndef score(): ...\n"
    "def plain(tokens, gamma, low=0): ...\ndef named(tokens, *, gamma, high=1): ...\n"
    "def any_of_them(tokens, **options): ...\n@print\ndef wrapped(tokens): ...\n"
)
PRETRAINED = ("model={path: ./model, architecture: null}", "base=null", "data.corpus=null")
TEACHER = ("method=opd", "rl.teachers={teacher: {kind: model, path: ./model}}")
ROWS = "data.train={kind: file, path: ./rows.jsonl}"
REWARD = "grading.by_source={sums: {kind: reward_model, path: ./reward, correct_from: 0.5}}"
GRADING = {"prepare_data", "rl"} | EVALUATIONS
PLAYING = GRADING | {"sft"}  # which may validate
OWN_CODE = {
    "data.train={kind: custom, factory: %s}": {"prepare_data"},
    "grading.kind={kind: custom, function: %s}": GRADING,
    "grading.kind={kind: any, of: [math, {kind: custom, function: %s}]}": GRADING,
    "environment={kind: tools, tools: [calculator, %s]}": PLAYING,
    "environment={kind: guess_number, scoring: {measures: {m: %s}, weights: {m: 1.0}}}": PLAYING,
    "environment={kind: custom, factory: %s}": PLAYING,
    "objective.terms.on_policy.loss={kind: custom, function: %s}": {"rl"},
    "objective.advantage={kind: custom, function: %s}": {"rl"},
}
READ = [  # overrides, a file, and the stages that read it
    *(([each % "'my_code.inner:one'"], "my_code/inner.py", stages) for each, stages in OWN_CODE.items()),
    ([ROWS], "rows.jsonl", {"prepare_data"}),
    (["data.train={kind: file, path: './*.jsonl'}"], "more.jsonl", {"prepare_data"}),
    ([REWARD], "reward/chat_template.jinja", GRADING),
    # Weights and shape of a teacher, and nothing else of it.
    (TEACHER, "model/README.md", set()),
    (TEACHER, "model/config.json", {"rl"}),
    (TEACHER, "model/model.safetensors", {"rl"}),
]


@pytest.fixture(autouse=True)
def outside(tmp_path, monkeypatch):
    """The working directory of a command: rows, own code that must not run, and a model."""
    monkeypatch.chdir(tmp_path)
    for folder in ("my_code", "model"):
        (tmp_path / folder).mkdir()
    for file, text in {
        "rows.jsonl": '{"prompt": "1"}\n',
        "my_module.py": CODE,
        "my_code/__init__.py": "raise RuntimeError",
        "my_code/inner.py": "one = 1",
        "model/config.json": '{"model_type": "none"}',
        "model/model.safetensors": "one",
    }.items():
        (tmp_path / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("overrides", "file", "stages"), READ)
def test_the_content_of_a_file_is_identity_of_the_stages_that_read_it(opened, outside, overrides, file, stages):
    """Own code is found where a command is started, and not run."""
    reward_folder(outside / "reward")
    before = opened(*overrides)
    with (outside / file).open("a") as changed:
        changed.write(" ")
    after = opened(*overrides)
    old, new = before.identities, after.identities
    assert {name for name in old if old[name].files != new[name].files} == stages
    assert moved(before, after) >= stages | ({"report"} if stages else set())
    assert stages or not moved(before, after)


def test_a_data_file_is_known_by_name_and_content_wherever_it_lies_and_two_of_a_name_both_count(opened, outside):
    def key(place, number, *other):
        (outside / place).parent.mkdir(exist_ok=True)
        (outside / place).write_text(f'{{"prompt": "{number}"}}\n')
        return opened(f"data.train={{kind: file, path: ./{place}}}", *other).identities["prepare_data"].key

    assert key("here/rows.jsonl", 1) == key("there/rows.jsonl", 1) != key("there/others.jsonl", 1)
    more = "data.suites.more={kind: file, path: ./there/rows.jsonl}"
    before = key("here/rows.jsonl", 1, more)
    (outside / "there/rows.jsonl").write_text('{"prompt": "2"}\n')
    assert key("here/rows.jsonl", 1, more) != before


NO_REWARD = [
    ({"head": False}, "", "has no head that scores: architectures in its config.json names Qwen2ForCausalLM"),
    ({"outputs": 2}, "", "has 2 outputs (id2label in config.json)"),
    ({"template": None}, "", "has no chat template"),
    ({}, "tokenizer_config.json", "has no tokenizer (tokenizer_config.json)"),
    ({}, "model.safetensors", "is no model folder, with config.json and weights"),
    ({}, "config.json", "is no model folder, with config.json and weights"),
]


@pytest.mark.parametrize(("made", "removed", "message"), NO_REWARD)
def test_a_folder_that_cannot_reward_is_refused_before_anything_runs(opened, outside, made, removed, message):
    folder = reward_folder(outside / "reward", **made)
    if removed:
        (folder / removed).unlink()
    with refused("grading.by_source.sums.path: ", message):
        opened(REWARD)


def graded(path):
    return [f"grading.kind={{kind: custom, function: '{path}'}}"]


def lost(name, options):
    return [f"objective.terms.on_policy.loss={{kind: custom, function: 'my_module:{name}', options: {{{options}}}}}"]


LOSS = "objective.terms.on_policy.loss.function: my_module:"
LEADING = "notes.json is a link out of the folder, to "
UNREADABLE = {  # a file, or a pattern, that cannot be read or has no end
    **dict.fromkeys(("memory", "memory/*.json", "memory/memory.json"), "Input/output error"),
    **dict.fromkeys(("device/rows.jsonl", "device/*.jsonl"), "it is a device; give a regular file"),
    **dict.fromkeys(("pipe/rows.jsonl", "pipe/*.jsonl"), "it is a pipe; give a regular file"),
}
REFUSED = [
    (["data.train={kind: file, path: /none/x.jsonl}"], ["data.train.path: /none/x.jsonl", "no such file"]),
    *(
        ([f"data.corpus={{kind: file, path: './{path}'}}"], ["data.corpus.path: ", f"cannot be read ({reason}"])
        for path, reason in UNREADABLE.items()
    ),
    *(
        ([*PRETRAINED, f"{key}=./pipe/rows.jsonl"], [key, "cannot be read (it is a pipe; give a regular"])
        for key in ("evaluation.template", "model.chat_template")
    ),
    ([*PRETRAINED, "model.path=./leading"], ["model.path: ", LEADING]),
    ([*TEACHER, "rl.teachers.teacher.path=./leading"], ["rl.teachers.teacher.path: ", LEADING, "secret.json"]),
    (graded("my_cod:score"), ["grading.kind.function: my_cod:score: there is no module my_cod; ", "searched in /"]),
    (graded("my_module.inner:score"), ["my_module.inner:score: there is no module my_module.inner"]),
    (graded("my_module:scor"), ["my_module:scor: ", "my_module.py has no 'scor'", "'score'?"]),
    (lost("plain", ""), [f"{LOSS}plain needs gamma; give it as options: {{gamma: VALUE}}"]),
    (lost("plain", "gama: 1"), [f"{LOSS}plain takes no argument 'gama'", "did you mean 'gamma'"]),
    (lost("named", "gamma: 1, low: 0"), [f"{LOSS}named takes no argument 'low'"]),
    (lost("named", "high: 1"), [f"{LOSS}named needs gamma; give"]),
]


@pytest.mark.parametrize(("overrides", "named"), REFUSED)
def test_what_is_not_there_or_cannot_be_read_is_refused_before_anything_runs(opened, outside, overrides, named):
    for folder in ("memory", "device", "pipe", "leading"):
        (outside / folder).mkdir()
    (outside / "memory/memory.json").symlink_to("/proc/self/mem")
    (outside / "device/rows.jsonl").symlink_to("/dev/zero")
    os.mkfifo(outside / "pipe/rows.jsonl")
    (outside / "secret.json").write_text("{}")
    (outside / "leading/config.json").write_text('{"model_type": "none"}')
    (outside / "leading/model.safetensors").write_text("one")
    (outside / "leading/notes.json").symlink_to("../secret.json")
    with refused(*named):
        opened(*overrides)


def test_own_code_that_is_there_in_whatever_way_is_found(opened, outside):
    for name in ("score", "there", "b", "c", "d", "os"):
        opened(*graded(f"my_module:{name}"))
    for options in ("plain gamma: 1", "named gamma: 1, high: 0", "any_of_them low: 1", "wrapped low: 1"):
        opened(*lost(*options.split(maxsplit=1)))
    for more in ("from math import *", "if True:\n    any_name = 1"):
        (outside / "my_module.py").write_text(CODE + more)
        opened(*graded("my_module:any_name"))
