import json
import os

import pytest
from synthetic.reward_models import reward_folder

from luffy.errors import ConfigError, DataError


def source(path):
    return f"data.train={{kind: file, path: {path}}}"


@pytest.mark.parametrize(("path", "changed"), [("a.jsonl", "a.jsonl"), ("*.jsonl", "b.jsonl")])
def test_the_content_of_source_files_is_identity(opened, tmp_path, path, changed):
    (tmp_path / "a.jsonl").write_text("one")
    before = opened(source(tmp_path / path)).identities
    (tmp_path / changed).write_text("two")
    after = opened(source(tmp_path / path)).identities
    assert all(before[stage].key != after[stage].key for stage in ("prepare_data", "report"))


def test_a_missing_source_names_the_field_and_the_file(opened):
    with pytest.raises(DataError, match=r"data\.train\.path: /none/x\.jsonl: no such file"):
        opened(source("/none/x.jsonl"))


TOOLS = "environment={kind: tools, tools: [calculator, 'my_code.inner:one']}"
SCORED = "environment={kind: guess_number, scoring: {measures: {m: 'my_code.inner:one'}, weights: {m: 1.0}}}"


@pytest.mark.parametrize(
    ("chosen", "stage"),
    [
        ("data.train={kind: custom, factory: 'my_code.inner:one'}", "prepare_data"),
        ("grading.kind={kind: custom, function: 'my_code.inner:one'}", "prepare_data"),
        ("grading.kind={kind: any, of: [math, {kind: custom, function: 'my_code.inner:one'}]}", "rl"),
        (TOOLS, "rl"),
        (SCORED, "rl"),
        ("environment={kind: custom, factory: 'my_code.inner:one'}", "rl"),
        ("objective.terms.on_policy.loss={kind: custom, function: 'my_code.inner:one'}", "rl"),
        ("objective.advantage={kind: custom, function: 'my_code.inner:one'}", "rl"),
    ],
)
def test_the_users_own_code_is_identity_and_is_not_run(opened, tmp_path, monkeypatch, chosen, stage):
    """As a command finds it that is started where the code is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_code").mkdir()
    (tmp_path / "my_code" / "__init__.py").write_text("raise RuntimeError")
    (tmp_path / "my_code" / "inner.py").write_text("one = 1")
    before = opened(chosen)
    (tmp_path / "my_code" / "inner.py").write_text("one = 2")
    assert before.identities[stage].files != opened(chosen).identities[stage].files


REWARD = "grading.by_source={{sums: {{kind: reward_model, path: '{}', correct_from: 0.5}}}}"


def test_a_reward_model_is_identity_wherever_graders_grade(opened, tmp_path):
    folder = reward_folder(tmp_path / "reward")
    before = opened(REWARD.format(folder)).identities
    tokenizer = folder / "chat_template.jinja"
    tokenizer.write_text(tokenizer.read_text() + " ")
    after = opened(REWARD.format(folder)).identities
    assert {stage for stage in before if before[stage].files != after[stage].files} == {
        "prepare_data", "rl", "evaluate_base", "evaluate_sft", "evaluate_rl"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("made", "removed", "message"),
    [
        ({"head": False}, "", "has no head that scores: architectures in its config.json names Qwen2ForCausalLM; "),
        ({"outputs": 2}, "", r"has 2 outputs \(id2label in config.json\), and a reward is one number"),
        ({"outputs": 3}, "", "has 3 outputs"),
        ({"template": None}, "", "has no chat template; put that of its training there as chat_template.jinja"),
        ({}, "tokenizer_config.json", r"has no tokenizer \(tokenizer_config.json\)"),
        ({}, "model.safetensors", "is no model folder, with config.json and weights"),
        ({}, "config.json", "is no model folder, with config.json and weights"),
    ],
)
def test_a_folder_that_cannot_reward_is_told_before_anything_runs(opened, tmp_path, made, removed, message):
    folder = reward_folder(tmp_path, **made)
    if removed:
        (folder / removed).unlink()
    with pytest.raises(DataError, match=rf"^grading\.by_source\.sums\.path: .*{message}"):
        opened(REWARD.format(folder))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_cod:score", r"grading\.kind\.function: my_cod:score: there is no module my_cod; it is searched in /"),
        ("my_code.inner:score", r"function: my_code\.inner:score: there is no module my_code\.inner"),
        ("my_code:scor", r"function: my_code:scor: .*my_code\.py has no 'scor'; did you mean 'score'\?"),
    ],
)
def test_own_code_that_is_not_there_is_told_before_anything_runs(opened, tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    chosen = f"grading.kind={{kind: custom, function: '{path}'}}"
    (tmp_path / "my_code.py").write_text(
        "import os.path as there\na, (b, *c) = 1, (2, 3)\nd: int = 1\ndef score(): ..."
    )
    with pytest.raises(ConfigError, match=message):
        opened(chosen)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("plain", "", "needs gamma; give it as options: {gamma: VALUE}"),
        ("plain", "gama: 1", "takes no argument 'gama', which options names; did you mean 'gamma'"),
        ("named", "gamma: 1, low: 0", "takes no argument 'low', which options names"),
        ("named", "high: 1", "needs gamma; give"),
        ("plain", "gamma: 1", None),
        ("named", "gamma: 1, high: 0", None),
        ("any_of_them", "low: 1", None),
        ("wrapped", "low: 1", None),
    ],
)
def test_arguments_of_a_loss_of_ones_own_are_checked_before_anything_runs(
    opened, tmp_path, monkeypatch, name, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_code.py").write_text(
        "def plain(tokens, gamma, low=0): ...\ndef named(tokens, *, gamma, high=1): ...\n"
        "def any_of_them(tokens, **options): ...\n@print\ndef wrapped(tokens): ...\n"
    )
    chosen = f"objective.terms.on_policy.loss={{kind: custom, function: 'my_code:{name}', options: {{{options}}}}}"
    if message is None:
        opened(chosen)
    else:
        with pytest.raises(ConfigError) as caught:
            opened(chosen)
        assert f"objective.terms.on_policy.loss.function: my_code:{name} {message}" in str(caught.value)


@pytest.mark.parametrize("name", ["score", "there", "b", "c", "d", "os"])
def test_own_code_that_is_there_in_whatever_way_is_found(opened, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text = "import os\nimport os.path as there\na, (b, *c) = 1, (2, 3)\nd: int = 1\ndef score(): ..."
    for more in ("", "\nfrom math import *", "\nif True:\n    any_name = 1"):
        (tmp_path / "my_code.py").write_text(text + more)
        opened(f"grading.kind={{kind: custom, function: 'my_code:{name if not more else 'any_name'}'}}")


@pytest.mark.parametrize("path", ["", "/*.json", "/memory.json"])
def test_a_file_that_cannot_be_read_is_the_users_mistake_wherever_it_is(opened, tmp_path, path):
    (tmp_path / "memory.json").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=r"data\.corpus\.path: .*: cannot be read \(Input/output error\)"):
        opened(f"data.corpus={{kind: file, path: '{tmp_path}{path}'}}")


@pytest.mark.parametrize(("target", "what"), [("/dev/zero", "a device"), (None, "a pipe")])
@pytest.mark.parametrize("path", ["/rows.jsonl", "/*.jsonl"])
def test_a_data_file_without_an_end_is_refused_and_not_read(opened, tmp_path, path, target, what):
    file = tmp_path / "rows.jsonl"
    file.symlink_to(target) if target else os.mkfifo(file)
    with pytest.raises(DataError, match=rf"data\.corpus\.path: .*: cannot be read \(it is {what}; give a regular file"):
        opened(f"data.corpus={{kind: file, path: '{tmp_path}{path}'}}")


@pytest.mark.parametrize("key", ["evaluation.template", "model.chat_template"])
def test_a_template_without_an_end_is_refused_and_not_read(opened, tmp_path, key):
    os.mkfifo(tmp_path / "own.jinja")
    with pytest.raises((ConfigError, DataError), match=rf"{key}.*: cannot be read \(it is a pipe; give a regular"):
        opened(*policy(model_folder(tmp_path)), f"{key}={tmp_path / 'own.jinja'}")


def policy(folder):
    return f"model={json.dumps({'path': str(folder), 'architecture': None})}", "base=null", "data.corpus=null"


def model_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    (folder / "model.safetensors").write_text("one")
    return folder


@pytest.mark.parametrize("key", ["model.path", "rl.teacher.path"])
def test_a_model_folder_that_leads_out_of_itself_is_refused_before_anything_runs(opened, tmp_path, key):
    folder = model_folder(tmp_path)
    (tmp_path / "secret.json").write_text("{}")
    (folder / "notes.json").symlink_to("../secret.json")
    chosen = policy(folder)
    if key == "rl.teacher.path":
        chosen = ["method=opd", f"rl.teacher={{kind: model, path: {folder}}}"]
    with pytest.raises(DataError, match=rf"{key}: .*notes\.json is a link out of the folder, to .*secret\.json"):
        opened(*chosen)


@pytest.mark.parametrize(("file", "counts"), [("README.md", False), ("config.json", True), ("model.safetensors", True)])
def test_weights_and_shape_of_a_teacher_are_identity_of_rl_alone(opened, tmp_path, file, counts):
    chosen = "method=opd", f"rl.teacher={{kind: model, path: {model_folder(tmp_path)}}}"
    before = opened(*chosen).identities
    (tmp_path / "model" / file).write_text('{"model_type": "other"}')
    after = opened(*chosen).identities
    assert (after["rl"].key != before["rl"].key) is counts
    assert after["base"].key == before["base"].key


def test_a_data_file_is_the_same_wherever_it_lies_and_not_under_another_name(opened, tmp_path):
    keys = []
    for place in ("here/rows.jsonl", "there/rows.jsonl", "there/others.jsonl"):
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        file.write_text('{"prompt": "1"}\n')
        keys.append(opened(f"data.train={{kind: file, path: {file}}}").identities["prepare_data"].key)
    assert keys[0] == keys[1] != keys[2]


def test_two_files_of_one_name_are_both_identity(opened, tmp_path):
    def key(second: str) -> str:
        for folder, text in (("a", "1"), ("b", second)):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "rows.jsonl").write_text(f'{{"prompt": "{text}"}}\n')
        paths = [f"{{kind: file, path: {tmp_path / folder / 'rows.jsonl'}}}" for folder in "ab"]
        return opened(f"data.train={paths[0]}", f"data.suites.more={paths[1]}").identities["prepare_data"].key

    assert key("2") != key("3")
