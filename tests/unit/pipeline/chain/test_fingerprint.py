import json
import os

import pytest

from luffy.config import STAGE_ORDER, load_experiment
from luffy.pipeline.chain.fingerprint import _facts_file, code_fingerprint, settings_fingerprint
from luffy.pipeline.chain.graph import build_graph

FILES = {
    "__init__.py": "",
    "stages/__init__.py": "",
    "stages/program.py": "from pkg.pipeline import lock",
    "stages/rl.py": '"""Docs."""\nfrom pkg.core import used\nfrom pkg.stages.program import main\n'
    "def run():\n    from .. import late\n",
    "core/__init__.py": "SETTING = 1",
    "core/used.py": "import pkg.deep.worker as w\nclass A:\n    x: int\n    '''Doc of x.'''\n",
    "core/unused.py": "y = 1",
    "deep/__init__.py": "",
    "deep/worker.py": "PROGRAM = 'pkg.deep.by_name'",
    "deep/by_name.py": "z = 1",
    "late.py": "late = 1",
    "pipeline/__init__.py": "",
    "pipeline/lock.py": "",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr("luffy.pipeline.chain.fingerprint._FRAME", ("pkg.pipeline", "pkg.stages.program"))
    root = tmp_path / "pkg"
    for name, code in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(code)
    return root


def changed_by(package, name, code):
    before = code_fingerprint("rl", package)
    (package / name).write_text(code)
    return code_fingerprint("rl", package) != before


def test_it_covers_the_import_closure(package):
    assert set(code_fingerprint("rl", package)) == {
        "pkg",
        "pkg.core",
        "pkg.core.used",
        "pkg.deep",
        "pkg.deep.worker",
        "pkg.deep.by_name",
        "pkg.late",
        "pkg.stages",
        "pkg.stages.rl",
    }


@pytest.mark.parametrize("name", ["core/__init__.py", "core/used.py", "deep/by_name.py", "late.py"])
def test_code_that_is_reached_changes_it(package, name):
    assert changed_by(package, name, "other = 2")


@pytest.mark.parametrize("name", ["core/unused.py", "pipeline/lock.py", "stages/program.py"])
def test_code_that_is_not_reached_and_the_frame_do_not_change_it(package, name):
    assert not changed_by(package, name, "other = 2")


def test_docstrings_comments_and_layout_do_not_change_it(package):
    code = "import   pkg.deep.worker as w  # why\n\nclass A:\n    'New.'\n    x: int\n    'Other doc.'\n"
    assert not changed_by(package, "core/used.py", code)


def test_it_is_the_same_in_every_version_of_python(package):
    """Whose syntax trees differ; a workspace may be used with several."""
    (package / "core" / "used.py").write_text("class A:\n    def f(self, *, n=None): return f'{n:>{n}}é'")
    assert code_fingerprint("rl", package)["pkg.core.used"] == "94699db7d48f276c"


def test_files_packaged_beside_a_module_change_it(package):
    (package / "core" / "page.html.jinja").write_text("<p>")
    assert changed_by(package, "core/page.html.jinja", "<div>")


@pytest.mark.parametrize("stage", STAGE_ORDER)
def test_every_stage_of_the_package_has_one(stage):
    fingerprint = code_fingerprint(stage)
    assert f"luffy.stages.{stage}" in fingerprint
    assert not any(name.startswith("luffy.pipeline") for name in fingerprint)


@pytest.mark.parametrize("stage", ["base", "sft"])
def test_what_rl_alone_needs_is_no_part_of_supervised_training(stage):
    of_rl = ("luffy.rl", "luffy.rollout.vllm_engine", "luffy.training.learner")
    assert {*of_rl[1:]} <= code_fingerprint("rl").keys()
    assert not [name for name in code_fingerprint(stage) if name.startswith(of_rl)]


@pytest.mark.parametrize("stage", ["evaluate", "difficulty", "sweep"])
def test_how_requests_reach_several_engines_is_no_part_of_what_they_answer(stage):
    of_ray = ("luffy.cluster.engine_pool", "luffy.cluster.ray_engine", "luffy.cluster.supervision")
    fingerprint = code_fingerprint(stage)
    assert "luffy.rollout.vllm_engine" in fingerprint
    assert not [name for name in fingerprint if name.startswith("luffy.cluster.")]
    assert {*of_ray[1:]} <= code_fingerprint("rl").keys()
    assert "luffy.cluster.engine_pool" not in code_fingerprint("sft")


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_how_answers_are_evaluated_counts_only_where_training_is_validated(stage):
    measuring = {"luffy.stages.held_out", "luffy.evaluation.evaluator", "luffy.statistics.accuracy"}
    assert not measuring & code_fingerprint(stage).keys()
    config = load_experiment("exp_configs/smoke.yaml", [f"{stage}.validation={{every: 2, suites: [longer]}}"])
    settings = {node.stage: node.settings for node in build_graph(config)}
    assert measuring <= settings_fingerprint(settings[stage]).keys()
    assert not [name for name in settings_fingerprint(settings["sft"]) if name.startswith("luffy.rl")]
    assert settings_fingerprint(settings["base"]) == {}


def in_a_new_process(package):
    """The fingerprint as a process would find it that has none in memory."""
    _facts_file.cache_clear()
    return code_fingerprint("rl", package)


def kept(package):
    (file,) = (package / "__pycache__").glob("facts.*.json")
    return file


def test_parsed_files_are_not_parsed_again(package, monkeypatch):
    before = in_a_new_process(package)
    monkeypatch.setattr("ast.parse", lambda *args, **options: pytest.fail("parsed"))
    assert in_a_new_process(package) == before


def test_a_changed_file_is_parsed_again_even_with_the_same_time_and_size(package):
    before, file = in_a_new_process(package), package / "late.py"
    stat = file.stat()
    file.write_text("late = 2")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert in_a_new_process(package) != before


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"made_by": 1}', '{"made_by": 1, "modules": {"a": []}}'])
def test_damaged_facts_are_found_again(package, damage):
    before = in_a_new_process(package)
    kept(package).write_text(damage)
    assert in_a_new_process(package) == before
    assert len(json.loads(kept(package).read_text())["modules"]) == len(before)


def test_facts_found_in_another_way_are_not_read(package):
    before = in_a_new_process(package)
    record = json.loads(kept(package).read_text())
    record["modules"] = {key: ["other", *names] for key, (_, *names) in record["modules"].items()}
    kept(package).write_text(json.dumps(record))
    assert set(in_a_new_process(package).values()) == {"other"}
    kept(package).write_text(json.dumps({**record, "made_by": "another version"}))
    assert in_a_new_process(package) == before


def test_a_package_that_cannot_be_written_to_has_a_fingerprint_too(package):
    (package / "__pycache__").write_text("in the way")
    before = in_a_new_process(package)
    assert in_a_new_process(package) == before
