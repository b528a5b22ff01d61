import pytest

from luffy.errors import DataError


def source(path):
    return f"data.train={{kind: file, path: {path}}}"


def test_the_content_of_a_source_file_is_identity(opened, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("one")
    before = opened(source(file))
    file.write_text("two")
    after = opened(source(file))
    assert before.identities["prepare_data"].key != after.identities["prepare_data"].key
    assert before.identities["report"].key != after.identities["report"].key


def test_a_missing_source_names_the_field_and_the_file(opened):
    with pytest.raises(DataError, match=r"data\.train\.path: /none/x\.jsonl: no such file"):
        opened(source("/none/x.jsonl"))


def test_new_content_is_the_reason_in_the_plan(opened, tmp_path, finish):
    file = tmp_path / "train.jsonl"
    file.write_text("one")
    finish(opened(source(file)), "prepare_data")
    file.write_text("two")
    assert opened(source(file)).plan()[0].reason.startswith(f"content of {file} ")


def test_a_pattern_stands_for_all_its_files(opened, tmp_path):
    (tmp_path / "a.jsonl").write_text("one")
    before = opened(source(tmp_path / "*.jsonl"))
    (tmp_path / "b.jsonl").write_text("two")
    after = opened(source(tmp_path / "*.jsonl"))
    assert before.identities["prepare_data"].key != after.identities["prepare_data"].key


def test_the_code_of_a_custom_source_is_identity(opened, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_source.py").write_text("one = 1")
    chosen = "data.train={kind: custom, factory: my_source:one}"
    before = opened(chosen)
    (tmp_path / "my_source.py").write_text("one = 2")
    after = opened(chosen)
    assert before.identities["prepare_data"].key != after.identities["prepare_data"].key


def test_the_weights_of_a_teacher_are_identity_of_rl_alone(opened, tmp_path):
    (tmp_path / "model.safetensors").write_text("one")
    chosen = "method=opd", f"rl.teacher={{kind: model, path: {tmp_path}}}"
    before = opened(*chosen)
    (tmp_path / "model.safetensors").write_text("two")
    after = opened(*chosen)
    assert before.identities["rl"].key != after.identities["rl"].key
    assert before.identities["base"].key == after.identities["base"].key
