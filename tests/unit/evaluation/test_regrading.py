"""Saved responses graded again: the same verdicts as if the other grader had been there from the start."""

from pathlib import Path

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.answered_stage import number_in
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.result_rows import result_row, sample_record

from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import ChoiceGrader, GraderKind, JudgeGrader, MathGrader, StrictMathGrader
from luffy.data.parquet import write_prompts
from luffy.errors import LostError
from luffy.evaluation.regrading import read_problems, regrade
from luffy.evaluation.results import EvaluationResults, FinishedEvaluation, read_evaluation, write_results
from luffy.evaluation.sample_files import read_samples_of, write_sample_records
from luffy.grading.pool import GraderPool
from luffy.report.evaluation_page import write_summaries
from luffy.stages.answers.asker import Asker, graded_records
from luffy.stages.answers.clients import Questions, Suite, TokenModelClient, render_as_ids
from luffy.stages.answers.store import AnswerStore
from luffy.stages.evaluate import protocol_of

STRICT, LENIENT = StrictMathGrader(), MathGrader(boxed="preferred")
DECODINGS = {"greedy": DecodingConfig(temperature=0.0)}


def answer(prompt: str, seed: int) -> str:
    """Three forms of the right answer: in a box, without one, and as math_strict does not read it."""
    right = number_in(prompt) + 1
    return (f"\\boxed{{{right}}}", f"The answer is {right}", f"\\boxed{{{right}.0000000000001}}")[(right - 1) % 3]


def evaluated(folder: Path, kind: GraderKind) -> Path:
    """What the stage would have written with that grader."""
    config = EvaluationConfig(decodings=DECODINGS, max_response_tokens=64, suites={"sums": SuiteConfig(grader=kind)})
    tokenizer = tiny_tokenizer()
    with GraderPool(1, PATIENCE_S) as pool:
        client = TokenModelClient(ScriptedEngine(tokenizer, answer), tokenizer)
        request = Questions.of_suite(Suite("sums", problems(9)), "greedy", config, render_as_ids(tokenizer), 7)
        store = AnswerStore(folder.with_suffix(".jsonl"))
        Asker(client, pool, 4).ask([request], store, lambda answers: None)
    records = list(graded_records(request, store))
    folder.mkdir()
    write_sample_records(folder / "samples.jsonl.zst", records)
    row = result_row(records, 0.95, protocol_of(config, "sums", "greedy"))
    write_results(folder / "results.json", EvaluationResults(checkpoint="rl", confidence=0.95, rows=(row,)))
    return folder


@pytest.mark.parametrize(("before", "after"), [(MathGrader(), LENIENT), (LENIENT, STRICT), (STRICT, MathGrader())])
def test_the_result_is_that_of_an_evaluation_with_the_other_grader(tmp_path, before, after):
    evaluation = read_evaluation(evaluated(tmp_path / "before", before))
    with GraderPool(1, PATIENCE_S) as pool:
        regrade(tmp_path / "after", evaluation, ["sums"], {}, after, pool, write_summaries)
    other = evaluated(tmp_path / "from_the_start", after)
    for name in ("samples.jsonl.zst", "results.json"):
        assert (tmp_path / "after" / name).read_bytes() == (other / name).read_bytes()
    assert (tmp_path / "after" / "summary.md").read_text().startswith("# Evaluation of RL")


def test_without_its_judge_nothing_is_written(tmp_path):
    evaluation = read_evaluation(evaluated(tmp_path / "before", MathGrader()))
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    with GraderPool(1, PATIENCE_S) as pool, pytest.raises(LostError, match="9 of 9 responses have no verdict"):
        regrade(tmp_path / "after", evaluation, ["sums"], {}, judge, pool, write_summaries)
    assert not list((tmp_path / "after").iterdir())


@pytest.mark.parametrize(
    ("kind", "response", "gold", "outcome"),
    [
        (STRICT, "<think>\n6 * 7</think>\nThus \\boxed{42}.", "42", "correct"),
        (STRICT, "<think>\n6 * 7 = \\boxed{42}</think>\nThus 42.", "42", "no_answer"),
        (STRICT, "<think>\n6 * 7 = \\boxed{42}", "42", "no_answer"),
        (STRICT, "<think>\n\\boxed{41}</think>\n\\boxed{40}, no, \\boxed{042}", "42", "correct"),
        (STRICT, "<think>\n6 * 7</think>\nThe answer is 42.", "42", "no_answer"),
        (ChoiceGrader(), "<think>\nA? B?</think>\nSo it is C.\n\nANSWER: C", "C", "correct"),
        (ChoiceGrader(), "<think>\nA? B?</think>\nThe answer is \\boxed{C}.", "C", "correct"),
        (ChoiceGrader(), "<think>\nANSWER: C", "C", "no_answer"),
    ],
)
def test_luffys_outputs_get_what_its_protocol_gives_and_the_letters_that_its_prompts_ask_for(
    tmp_path, kind, response, gold, outcome
):
    """Boxes behind `</think>` alone; its graders knew no letter outside a box, where GPQA's own prompt wants it."""
    record = sample_record("s", "u", False, response=response, answer=None, ground_truth=gold)
    write_sample_records(tmp_path / "samples.jsonl.zst", [record])
    rows = (result_row([record], 0.95),)
    saved = FinishedEvaluation(tmp_path, EvaluationResults(checkpoint="rl", confidence=0.95, rows=rows))
    with GraderPool(1, PATIENCE_S) as pool:
        (part,) = regrade(tmp_path / "after", saved, ["s"], {}, kind, pool, write_summaries)
    (after,) = read_samples_of(tmp_path / "after")
    assert (after.outcome, after.response, len(part.changed)) == (outcome, response, outcome == "correct")


def test_the_questions_come_from_the_prepared_suites_and_from_the_validation_split_beside_them(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    write_prompts(suites / "sums.parquet", problems(2))
    write_prompts(tmp_path / "validation.parquet", problems(1))
    found = read_problems(suites, ["sums", "validation"])
    asked = {("sums", "p0"): "0 +1", ("sums", "p1"): "1 +1", ("validation", "p0"): "0 +1"}
    assert {key: problem.question for key, problem in found.items()} == asked
    with refused("others.parquet"):
        read_problems(suites, ["others"])


def test_what_is_no_evaluation_is_refused(tmp_path):
    with refused("no finished evaluation", "results.json"):
        read_evaluation(tmp_path)
    folder = evaluated(tmp_path / "it", STRICT)
    (folder / "samples.jsonl.zst").unlink()
    with refused("samples.jsonl.zst"):
        list(read_evaluation(folder).records())
