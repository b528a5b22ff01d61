"""What a stage reads outside of the workspace is what its key was computed from, until the stage has ended."""

import os
import sys

import pytest
from support.refusals import refused
from support.stages import execute, opened

from luffy.config import load_experiment
from luffy.errors import DataError, StageFailed
from luffy.import_paths import NotImported, imported, own_imports
from luffy.pipeline.outside import outside_files
from luffy.pipeline.resources import check_resources
from luffy.stages import prepare_data

LOSS = "objective.terms.on_policy.loss={kind: custom, function: '%s:loss'}"
ROW = '{"prompt": "1 + 1 =", "answer": "2", "completion": "2"}\n'


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """Writes files into a folder where Python looks; modules of that name are forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def write(**files: str) -> None:
        for name, text in files.items():
            file = tmp_path / f"{name.replace('__in__', '/')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


IMPORTS = [
    ("mine", "from squashing import squash"),
    ("mine", "import os, squashing as s"),
    ("mine", "def loss(tokens):\n    import squashing"),
    ("mine", "import between"),
    ("packed.mine", "from squashing import *"),
    ("packed.mine", "from . import near"),
    ("packed.mine", "from .near import squash"),
    ("packed.mine", "from packed.near import squash"),
]


@pytest.mark.parametrize(("module", "statement"), IMPORTS)
def test_what_a_module_of_the_users_imports_from_beside_itself_is_identity(own_code, module, statement):
    own_code(between="import squashing", packed__in____init__="", packed__in__near="import squashing")
    own_code(**{module.replace(".", "__in__"): f"{statement}\nloss = None"}, squashing="one = 1")

    def files() -> dict[str, str]:
        settings = next(node.settings for node in opened(".", "smoke.yaml", LOSS % module).nodes if node.name == "rl")
        return outside_files(settings)

    before = files()
    own_code(squashing="one = 2")
    changed = {name for name, _ in before.items() ^ files().items()}
    assert changed == {f"{module}:loss imports squashing"}


def test_only_the_users_own_code_counts(own_code, tmp_path, monkeypatch):
    (tmp_path / "place" / "other-1.dist-info").mkdir(parents=True)
    (tmp_path / "place/other.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "place")
    own_code(mine="import json, torch, luffy.types, other, no_such_module, near", near="import mine")
    assert [*own_imports("mine:loss")] == ["near"]


def test_own_code_that_is_loaded_otherwise_than_by_a_statement_is_refused(own_code):
    own_code(mine="import importlib\nloss = importlib.import_module('hid' + 'den').loss", hidden="loss = len")
    with pytest.raises(NotImported, match=r"mine:loss loads hidden \(.*hidden\.py\) otherwise"):
        imported("mine:loss")


@pytest.mark.parametrize("size", [1000, 12_000_000])
def test_replaced_weights_of_the_same_size_and_time_are_others(tmp_path, size):
    folder = tmp_path / "teacher"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "none"}')
    weights, found = folder / "model.safetensors", set[str]()
    chosen = "method=opd", f"rl.teachers={{teacher: {{kind: model, path: {folder}}}}}"
    for byte in (b"1", b"2"):  # as every update of a model does, it changes all of it
        weights.write_bytes(byte * size)
        os.utime(weights, (0, 0))
        found.add(opened(tmp_path, "smoke.yaml", *chosen).identities["rl"].key)
    assert len(found) == 2


MISSING = [
    ("opd", "work/models/qwen", "rl.teachers.teacher.path"),  # of a hub id there is at most one slash
    ("opd", "my models/qwen", "rl.teachers.teacher.path"),
    ("opd", "~nobody-here/qwen", "rl.teachers.teacher.path"),
    ("opd", "qwen.gguf", "rl.teachers.teacher.path"),
    ("tgopd", "/nowhere/qwen", "difficulty.teacher"),
]


@pytest.mark.parametrize(("method", "path", "setting"), MISSING)
def test_a_model_that_is_neither_here_nor_a_hub_id_is_missing_before_a_run(tmp_path, method, path, setting):
    with refused(f"{setting}: {path}: no such file", error=DataError):
        opened(tmp_path, "smoke.yaml", f"method={method}", f'rl.teachers.teacher={{kind: model, path: "{path}"}}')


def test_a_folder_without_a_model_is_named_by_the_setting_of_its_teacher(tmp_path):
    asked = f"rl.teachers={{teacher: {{kind: model, path: {tmp_path}}}}}"
    with refused(f"rl.teachers.teacher.path: {tmp_path} has no config.json", error=DataError):
        check_resources(load_experiment("smoke", ["method=opd", asked]))


@pytest.mark.parametrize("moment", ["between plan and start", "while its tokens are counted"])
def test_of_a_stage_under_which_a_file_changes_nothing_is_kept(tmp_path, monkeypatch, moment):
    rows, build = tmp_path / "rows.jsonl", prepare_data.build_tokenizer
    rows.write_text(ROW * 3)
    experiment = opened(tmp_path / "work", "smoke.yaml", f"data.suites.more={{kind: file, path: {rows}}}")
    if moment == "between plan and start":
        rows.write_text(ROW)
        complaint = r"changed since the run was planned: rows\.jsonl \(data\.suites\.more\)"
    else:
        monkeypatch.setattr(prepare_data, "build_tokenizer", lambda texts: (rows.write_text(ROW), build(texts))[1])
        complaint = "nothing of its result is kept"
    with pytest.raises(StageFailed, match=complaint) as failure:
        execute(experiment, "prepare_data")
    assert failure.value.exit_code == 2
    directory = experiment.plan_node("prepare_data").directory
    assert not [*directory.rglob("*.parquet"), *directory.glob("manifest.json"), *directory.glob("identity.json")]
