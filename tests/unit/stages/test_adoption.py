"""Responses that were drawn before are not drawn again, and what comes out is what a fresh evaluation gives."""

import functools
import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from synthetic.answered_stage import contents, stage_context, use
from synthetic.arithmetic import problems
from synthetic.finished_stages import write_finished
from synthetic.stage_jobs import write_wide_model

from luffy.config.evaluation import DecodingConfig, EvaluationConfig, SuiteConfig
from luffy.config.grading import ExactGrader, GradingConfig, MathGrader
from luffy.config.settings import EvaluateSettings
from luffy.data.parquet import write_prompts
from luffy.evaluation.sample_files import SAMPLES_FILE, read_samples_of
from luffy.evaluation.second_grades import ResponseGrades
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade
from luffy.pipeline.events import EventReader
from luffy.stages import evaluate
from luffy.stages.answers.clients import sample_key
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.evaluate import OUTPUTS, run
from luffy.stages.program import StageResult
from luffy.types import FinishReason, Outcome

EVALUATION = EvaluationConfig(
    decodings={"greedy": DecodingConfig(temperature=0.0), "hot": DecodingConfig(temperature=1.0, num_samples=2)},
    max_response_tokens=16,
)
SETTINGS = EvaluateSettings(seed=7, dtype="float32", evaluation=EVALUATION, grading=GradingConfig())


def evaluation(**changes: object) -> EvaluateSettings:
    return SETTINGS.model_copy(update={"evaluation": EVALUATION.model_copy(update=changes)})


def finish(directory: Path, outputs: tuple[str, ...]) -> None:
    write_finished(directory, "evaluate", "it", directory.name, outputs)


def write_data(folder: Path, *suites: str) -> None:
    (folder / "suites").mkdir(parents=True)
    for name in suites:
        write_prompts(folder / "suites" / f"{name}.parquet", problems(4))


def write_model(folder: Path, seed: int) -> None:
    write_wide_model(folder / "model", seed)
    finish(folder, ("model",))


def answer(prompt: str, seed: int) -> str:
    """Differs from draw to draw, and graders differ on it."""
    return (f"\\boxed{{{seed % 3}}}", f"The answer is {seed % 3}")[seed % 2]


@pytest.fixture(scope="module", autouse=True)
def shared_graders() -> Iterator[None]:
    """One pool for each way of grading: to start its workers takes longer than all the rest."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        @functools.cache
        def pool(config: str) -> GraderPool:
            return stack.enter_context(GraderPool(1, 60.0, GradingConfig.model_validate_json(config)))

        patch.setattr(GraderPool, "configured", lambda workers, config, *_: nullcontext(pool(config.model_dump_json())))
        yield


class Bench:
    """Evaluations of one workspace, and fresh ones elsewhere."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._patch = monkeypatch
        self.inputs = {"data": root / "data", "model": root / "model"}
        write_data(self.inputs["data"], "a", "b")
        write_model(self.inputs["model"], seed=0)

    def evaluate(self, name: str, settings: EvaluateSettings = SETTINGS, **inputs: Path) -> tuple[StageResult, int]:
        """Run and finish it; returns the result, and how many responses were drawn."""
        out = self.root / "workspace" / name
        result, drawn = self._run(out, settings, inputs)
        finish(out, result.outputs)
        return result, drawn

    def is_as_fresh(self, name: str, settings: EvaluateSettings, **inputs: Path) -> bool:
        """Whether an evaluation that finds nothing to start from writes the same bytes."""
        fresh = self.root / f"fresh-{name}" / name
        self._run(fresh, settings, inputs)
        return contents(fresh, OUTPUTS) == contents(self.root / "workspace" / name, OUTPUTS)

    def _run(self, out: Path, settings: EvaluateSettings, inputs: dict[str, Path]) -> tuple[StageResult, int]:
        engine = use(self._patch, answer)
        return run(settings, stage_context("evaluate_sft", out, {**self.inputs, **inputs}, 3)), len(engine.requests)


@pytest.fixture
def bench(tmp_path, monkeypatch) -> Bench:
    made = Bench(tmp_path, monkeypatch)
    assert made.evaluate("first")[1] == 24
    return made


@pytest.mark.parametrize(
    "settings",
    [
        evaluation(confidence=0.8),
        SETTINGS.model_copy(update={"grading": GradingConfig(kind=MathGrader(boxed="preferred"))}),
        evaluation(suites={"a": SuiteConfig(grader=ExactGrader())}),
    ],
    ids=["confidence", "grader", "grader of a suite"],
)
def test_another_confidence_or_grader_draws_nothing(bench, settings):
    result, drawn = bench.evaluate("second", settings)
    assert (drawn, result.resumed_from) == (0, 0)
    assert bench.is_as_fresh("second", settings)
    events = EventReader(bench.root / "workspace" / "second" / "events.jsonl").read()
    last = [event for event in events if event.kind == "progress"][-1]
    assert (last.step, last.total) == (24, 24)
    first, second = (bench.root / "workspace" / name / "results.json" for name in ("first", "second"))
    assert first.read_bytes() != second.read_bytes()


def test_another_suite_or_decoding_draws_itself_alone(bench):
    write_data(bench.root / "more", "b", "a", "c")
    assert bench.evaluate("second", data=bench.root / "more")[1] == 12
    assert bench.is_as_fresh("second", SETTINGS, data=bench.root / "more")
    warm = evaluation(decodings={"warm": DecodingConfig(temperature=0.5), **EVALUATION.decodings})
    assert bench.evaluate("third", warm, data=bench.root / "more")[1] == 12
    assert bench.is_as_fresh("third", warm, data=bench.root / "more")


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        (SETTINGS.model_copy(update={"dtype": "bfloat16"}), 24),
        (evaluation(max_response_tokens=15), 24),
        (evaluation(stop=("1",)), 24),
        (evaluation(suites={"a": SuiteConfig(num_samples=3)}), 12),
        (evaluation(suites={"b": SuiteConfig(template="none")}), 12),
    ],
)
def test_what_is_drawn_otherwise_is_drawn_again(bench, settings, drawn):
    assert bench.evaluate("second", settings)[1] == drawn


def test_another_model_and_other_problems_are_asked_anew(bench):
    write_model(bench.root / "other", seed=1)
    assert bench.evaluate("second", model=bench.root / "other")[1] == 24
    write_data(bench.root / "changed", "a", "b")
    write_prompts(bench.root / "changed" / "suites" / "a.parquet", problems(5))
    assert bench.evaluate("third", data=bench.root / "changed")[1] == 15


def break_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def other_responses(path: Path) -> None:
    """Another evaluation's samples under this one's hashes; the manifest knows no better."""
    shutil.copy(path.parents[1] / "eighth" / SAMPLES_FILE, path)
    finish(path.parent, OUTPUTS)


def discard(path: Path) -> None:
    """As a deletion that was interrupted leaves it."""
    path.parent.rename(path.parent.with_name(f".trash-{path.parent.name}"))


@pytest.mark.parametrize("damage", [Path.unlink, break_off, other_responses, discard])
def test_an_evaluation_that_does_not_count_is_not_taken_from(bench, damage):
    bench.evaluate("eighth", SETTINGS.model_copy(update={"seed": 8}))
    damage(bench.root / "workspace" / "first" / SAMPLES_FILE)
    assert bench.evaluate("second")[1] == 24
    assert bench.is_as_fresh("second", SETTINGS)


def test_what_an_evaluation_has_begun_itself_is_kept_and_the_rest_adopted(bench):
    own = bench.root / "workspace" / "second"
    own.mkdir()
    grade = ResponseGrades("math", Grade(Outcome.WRONG, "5"), None)
    store = AnswerStore(own / "answers.jsonl")
    store.add([(sample_key("a", "greedy", "p0", 0), ModelAnswer("it is 5", 4, FinishReason.STOP, grades=grade))])
    store.close()
    result, drawn = bench.evaluate("second", evaluation(confidence=0.8))
    assert (drawn, result.resumed_from) == (0, 1)
    first, *others = read_samples_of(own)
    assert (first.uid, first.response) == ("p0", "it is 5")
    assert [each.response for each in others] == [each.response for each in read_samples_of(own.parent / "first")][1:]


def test_other_code_that_asks_draws_anew(bench, monkeypatch):
    known = evaluate.code_identity
    monkeypatch.setattr(evaluate, "code_identity", lambda rooms: {**known(rooms), "rollout": "edited"})
    assert bench.evaluate("second")[1] == 24


def test_the_hashes_say_what_was_drawn_and_nothing_of_grading(bench):
    bench.evaluate("second", evaluation(confidence=0.8))
    first, second = (bench.root / "workspace" / name / "responses.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    lines = json.loads(first.read_text())
    assert [(line["decoding"], line["suite"]) for line in lines] == [
        ("greedy", "a"), ("greedy", "b"), ("hot", "a"), ("hot", "b"),
    ]  # fmt: skip
    assert len({line["digest"] for line in lines}) == 4
