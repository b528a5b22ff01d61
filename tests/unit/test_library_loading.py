"""Imports without garbage collection and without MLflow."""

import gc
import os
import subprocess
import sys

import pytest

from luffy.library_loading import without_collections


def test_nothing_is_collected_within_the_block_and_what_it_made_is_frozen():
    frozen = gc.get_freeze_count()
    with without_collections():
        assert not gc.isenabled()
        kept = [[] for _ in range(10_000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() - frozen >= len(kept)


def test_in_the_middle_of_a_program_nothing_is_frozen():
    frozen = gc.get_freeze_count()
    with without_collections(freeze=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_a_failed_import_leaves_collection_on_and_a_program_that_had_it_off_keeps_it_off():
    with pytest.raises(ImportError), without_collections():
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


PROBE = """
import gc, sys
print(gc.isenabled(), __name__, sys.argv[1:], sys.orig_argv[1:])
from luffy.library_loading import loaded
loaded()
print(gc.isenabled(), gc.get_freeze_count() > 0)
"""


def test_a_module_runs_as_by_python_m_and_collects_from_when_it_says_that_it_is_loaded(tmp_path):
    (tmp_path / "probe.py").write_text(PROBE)
    command = [sys.executable, "-m", "luffy.library_loading", "probe", "--out", "x"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["False __main__ ['--out', 'x'] ['-m', 'probe', '--out', 'x']", "True True"]


WITH_DEEPSPEED = """
import sys
from luffy.library_loading import without_collections
with without_collections():
    import deepspeed
from pathlib import Path
print("mlflow" in sys.modules, "pyarrow" in sys.modules, len(list(Path("/proc/self/task").iterdir())))
import mlflow
print(mlflow.__name__)
"""


def test_deepspeed_loads_no_mlflow_and_its_thread_and_tracking_can_load_it_afterwards():
    pytest.importorskip("mlflow", reason="needs the package mlflow")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITH_DEEPSPEED]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread).stdout
    assert said.splitlines()[-2:] == ["False False 1", "mlflow"]
