"""Docstrings of fields, where they are asked for: in the list of fields and the reference page."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from luffy.config.execution import VLLMConfig
from luffy.config.fields import all_fields
from luffy.config.strict import StrictModel, field_docs


class Base(StrictModel):
    plain: int = 0
    said: int = 0
    """What the base
    says."""


class Changed(Base):
    said: int = 1
    own: int = 0
    """Its own."""

    def method(self) -> None:
        """Of no field."""


class Again(Base):
    said: int = 1
    """Said again."""


def test_docstrings_are_those_below_the_fields_also_of_base_classes() -> None:
    assert field_docs(Base) == {"said": "What the base\nsays."}
    assert field_docs(Changed) == {"said": "What the base\nsays.", "own": "Its own."}
    assert field_docs(Again) == {"said": "Said again."}

    class Inner(StrictModel):
        field: int = 0
        """Not read."""

    assert field_docs(Inner) == {}, "a class within a function has no source of its own"


def test_the_list_of_fields_describes_them_on_one_line() -> None:
    (field,) = (field for field in all_fields("execution.vllm") if field.path == "execution.vllm.max_num_seqs")
    assert field.description == " ".join(field_docs(VLLMConfig)["max_num_seqs"].split())
    assert len([field for field in all_fields() if field.description]) > 100


def test_the_command_line_reads_no_source() -> None:
    code = "import luffy.cli.main, sys; from luffy.config import strict; print(strict._docs_in.cache_info())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "misses=0" in said


def test_the_reference_page_has_them() -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", Path(__file__).parents[3] / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    assert " ".join(field_docs(VLLMConfig)["max_num_seqs"].split()) in hooks.configuration_page()
    notebook = Path(__file__).parents[3] / "docs" / "notebooks" / "two_methods.ipynb"
    page = hooks.notebook_page(notebook.read_text(), notebook.name)
    assert all(
        shown in page for shown in ("# Two methods on one task", "```python\nimport luffy", "base64,", "<table>")
    )
    assert "<style" not in page
