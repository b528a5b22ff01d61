"""What is confidential is decided in one place, and nothing that people read shows its text."""

import ast
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.result_rows import result_row, sample_record

import luffy
from luffy.confidential import is_confidential, may_show_prompt
from luffy.data.parquet import shown_references, write_prompts
from luffy.data.tokenizer import texts_of
from luffy.evaluation.changes import find_changes
from luffy.evaluation.results import EvaluationResults, read_evaluation, write_results
from luffy.evaluation.sample_files import SAMPLES_FILE, SampleRecord, write_sample_records
from luffy.report.evaluation_page import evaluation_page
from luffy.report.page import html, markdown
from luffy.types import Message, Prompt

ROOT = Path(__file__).parents[3]
SECRET = "the-secret"
PROMPT = Prompt("u1", "open", (Message("user", SECRET),), SECRET)
TEXTS = dict.fromkeys(("prompt", "response", "answer", "ground_truth", "reason"), SECRET)
RECORD = sample_record("open", "u", **TEXTS)
MARKS = ({"confidential": True}, {"suite": "gpqa_diamond"}, {"suite": "my GPQA"})


def test_a_mark_or_the_name_of_the_benchmark_makes_it_confidential():
    names = {"aime24": False, "gpqa_diamond": True, "My-GPQA": True}
    assert {name: is_confidential(name, marked=False) for name in names} == names
    assert is_confidential("aime24", marked=True)


def test_a_prompt_is_confidential_by_its_mark_or_its_source(tmp_path):
    marked = replace(PROMPT, uid="u2", extra_info={"confidential": True})
    known = replace(PROMPT, uid="u3", data_source="GPQA-main")
    prompts = [PROMPT, marked, known]
    write_prompts(tmp_path / "train.parquet", prompts)
    assert [may_show_prompt(prompt) for prompt in prompts] == [True, False, False]
    assert [*texts_of(prompts)] == [*texts_of([PROMPT])] == [SECRET, SECRET]
    assert shown_references(tmp_path / "train.parquet") == {"u1": SECRET, "u2": None, "u3": None}


def evaluation(folder: Path, record: SampleRecord) -> EvaluationResults:
    folder.mkdir(parents=True)
    write_sample_records(folder / SAMPLES_FILE, [record])
    results = EvaluationResults(checkpoint="rl", confidence=0.95, rows=(result_row([record], 0.95),))
    write_results(folder / "results.json", results)
    return results


def shown(folder: Path, record: SampleRecord) -> dict[str, str]:
    """Everything that is made of an evaluation for people or notebooks."""
    first, second = folder / "first", folder / "second"
    page = evaluation_page(evaluation(first, record))
    evaluation(second, replace(record, correct=False, outcome="wrong"))
    (cell,) = find_changes(read_evaluation(first), read_evaluation(second)).cells
    return {
        "results.json": (first / "results.json").read_text(),
        "summary.md": markdown(page),
        "summary.html": html(page),
        "changes": str(cell.changed) if cell.changed[0].may_be_shown else "",
    }


@pytest.mark.parametrize("mark", MARKS)
def test_nothing_made_of_an_evaluation_shows_confidential_text(tmp_path, mark):
    found = shown(tmp_path / "hidden", replace(RECORD, **mark))
    assert [name for name, text in found.items() if SECRET in text] == []
    found = shown(tmp_path / "shown", RECORD)
    assert [name for name, text in found.items() if SECRET in text] == ["changes"], "where it may be"


def test_frames_hold_no_text_of_problems():
    assert {"prompt", "response", "answer", "ground_truth"}.isdisjoint(luffy.load_problem_results.__doc__.split("`"))


def reads(tree: ast.AST) -> bool:
    """Whether code reads a mark `.confidential`, or names the benchmark or the key of `extra_info` itself."""

    def constants(nodes: Iterable[ast.AST]) -> list[str]:
        return [str(node.value).lower() for node in nodes if isinstance(node, ast.Constant)]

    return any(
        (isinstance(node, ast.Attribute) and node.attr == "confidential")
        or (isinstance(node, ast.Compare) and any("gpqa" in text for text in constants(ast.walk(node))))
        or (isinstance(node, ast.Call) and "confidential" in constants(node.args))
        for node in ast.walk(tree)
    )


def test_only_the_rule_itself_reads_marks():
    """A new page or export has no rule of its own: it asks `may_be_shown`, `may_show_prompt` or `is_confidential`."""
    known = {
        "luffy/data/sources/stored_rows.py",  # marks the rows of a source that is configured so, and hides its messages
        "luffy/evaluation/sample_files.py",  # `may_be_shown`
    }
    modules = [path for top in ("luffy", "tasks", "flows") for path in (ROOT / top).rglob("*.py")]
    found = {path.relative_to(ROOT).as_posix() for path in modules if reads(ast.parse(path.read_text()))}
    assert found <= known, json.dumps(sorted(found - known))
