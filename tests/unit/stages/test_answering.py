"""What every stage that asks a model guarantees, whether an engine answers or an endpoint.

Nothing depends on batches; each response has a seed of its own; what ended early asks for the rest alone, and ends with
the same bytes; responses that were drawn before are not drawn again, and what comes out is what a fresh stage makes.

`tests/integration/test_engine_pool.py` asks vLLM.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from support.refusals import refused
from synthetic.answered_stage import (
    contents,
    evaluating,
    measuring,
    number_in,
    progress_of,
    recorded,
    sampling,
    stage_context,
    teaching,
    write_inputs,
)
from synthetic.arithmetic import ScriptedEngine, problems, tiny_tokenizer
from synthetic.endpoint import CHAT, Endpoint, Reply, completion, mortal, refusal
from synthetic.finished_stages import write_finished
from synthetic.stage_jobs import write_wide_model

from luffy.config.evaluation import DecodingConfig, SuiteConfig
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import ExactGrader, GradingConfig, MathGrader
from luffy.config.model import EndpointModel, ModelConfig
from luffy.config.settings import BaseSettings, StageSettings, SweepSettings
from luffy.data.parquet import write_prompts
from luffy.errors import ClusterError, ConfigError, DataError, LostError
from luffy.evaluation.sample_files import SAMPLES_FILE, read_samples_of, write_sample_records
from luffy.grading.request import Grade
from luffy.pipeline.reuse import COMPLETE_FILE
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages import base, difficulty, evaluate, sample, sweep
from luffy.stages.answers.clients import sample_key
from luffy.stages.answers.store import AnswerStore, ModelAnswer
from luffy.stages.evaluate import OUTPUTS
from luffy.stages.program import StageResult
from luffy.types import FinishReason, Outcome

pytestmark = pytest.mark.usefixtures("shared_graders")
STEPS = (20, 40)
RATES = ("pass_rates.parquet", "card.json", "card.md")
TAUGHT = ("train.parquet", "sft.parquet", "rl_complement.parquet", "card.json", "card.md")
SERVED: dict[str, object] = {"endpoint": {"name": "org/big"}}
EVERY_RATE = {"min_pass_rate": 0.0, "max_pass_rate": 1.0}
TEACHER = {"max_response_tokens": 16, "num_samples": 4}


def sweeping(**changes: object) -> SweepSettings:
    return SweepSettings(protocol=evaluating(**changes), steps=STEPS)


def taught_by(
    where: dict[str, object], seed: int = 7, rewrite: dict[str, object] | None = None, **teacher: object
) -> StageSettings:
    return teaching({"own": {**where, **TEACHER, **teacher}}, seed=seed, prompts="all", rewrite=rewrite)


@dataclass(frozen=True)
class Asking:
    """A stage that asks a model."""

    run: Callable[..., StageResult]
    settings: Callable[..., StageSettings]
    outputs: tuple[str, ...]
    models: int = 1
    """The same questions go to so many."""


STAGES = {
    "evaluate": Asking(evaluate.run, evaluating, OUTPUTS),
    "evaluate, served": Asking(evaluate.run, partial(evaluating, engine="openai"), OUTPUTS),
    "sweep": Asking(sweep.run, sweeping, tuple(f"step_{n:06d}/{name}" for n in STEPS for name in OUTPUTS), models=2),
    "difficulty": Asking(difficulty.run, partial(measuring, **EVERY_RATE), ("train.parquet", *RATES)),
    "sample": Asking(sample.run, sampling, ("sampled.parquet", *RATES)),
    "sample, taught": Asking(sample.run, partial(taught_by, {"path": "model"}), TAUGHT),
    "sample, taught, served": Asking(sample.run, partial(taught_by, SERVED), TAUGHT),
    "sample, rewriting, served": Asking(sample.run, partial(taught_by, SERVED, rewrite={}), TAUGHT),
}


class Attempt(NamedTuple):
    """Questions that a stage asked, the prompt and the seed of each in order, and what it ended with."""

    asked: list[tuple[str, int]]
    result: StageResult | None


class Engine(ScriptedEngine):
    """One whose answers do not depend on its weights."""

    def load_weights_from(self, folder: Path, version: int) -> None:
        assert folder.is_dir()


def script(prompt: str, seed: int) -> str:
    """Right or wrong, written in one of several ways, on which graders differ."""
    number = number_in(prompt) + seed // 3 % 2
    return (f"\\boxed{{{number}}}", f"+\\boxed{{{number}}}", f"The answer is {number}")[seed % 3]


def attempt(
    name: str,
    out: Path,
    inputs: dict[str, Path],
    batch: int = 4,
    answers: int | None = None,
    error: type[BaseException] = LostError,
    **changes: object,
) -> Attempt:
    """Run the stage, and finish it; with `answers` the model ends with `error` after about so many."""
    stage, asked, tokenizer = STAGES[name], list[tuple[str, int]](), tiny_tokenizer()
    settings, execution = stage.settings(**changes), ExecutionConfig(rollout_batch_size=batch)

    def answered(prompt: str, seed: int) -> str:
        if answers is not None and len(engine.requests) > answers:
            raise error
        return script(prompt, seed)

    def served(path: str, body: dict) -> Reply:
        asked.append((body["messages"][-1]["content"], body["seed"]))
        return completion(script(*asked[-1]), num_tokens=5, prompt_tokens=10)

    last_words = refusal(402, "no credit") if error is ConfigError else None
    endpoint = Endpoint(served if answers is None else mortal(answers, served, last_words), (CHAT,))
    engine = Engine(tokenizer, answered)
    if name.endswith("served"):
        server = ServerConfig(urls=(endpoint.url,), max_retries=0, concurrency=batch if answers is None else 1)
        execution = ExecutionConfig(server=server, teachers={"own": server})
        inputs = {**inputs, "model": inputs["model"].with_name("served")}
    node = "sample_1" if name == "sample" else name.partition(",")[0]
    context, result = stage_context(node, out, inputs, execution=execution), None
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(inputs["model"])
        patch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
        patch.setattr(sweep, "export_checkpoint", lambda checkpoint, *others: shutil.copytree(checkpoint, others[-1]))
        recorded(context, settings, str(inputs["data"]))
        if answers is None:
            result = stage.run(settings, context)
            write_finished(out, node.partition("_")[0], node, out.name, result.outputs)
        else:
            with pytest.raises(error):
                stage.run(settings, context)
    endpoint.close()
    assert engine.closed or not engine.requests
    asked += [(tokenizer.decode(each.prompt_ids), each.seed) for each in engine.requests]
    return Attempt(asked, result)


def written(root: Path, chosen: slice = slice(None)) -> dict[str, Path]:
    """Inputs for all stages."""
    inputs = write_inputs(root, chosen=chosen)
    for step in STEPS:
        checkpoint = inputs["model"] / "checkpoints" / f"step_{step:06d}"
        shutil.copytree(inputs["model"] / "model", checkpoint)
        (checkpoint / COMPLETE_FILE).touch()
    write_finished(inputs["model"], "sft", "sft", "sft", ("model",))
    settings = BaseSettings(seed=7, model=ModelConfig(endpoint=EndpointModel(name="gpt-x")), base=None)
    base.run(settings, stage_context("base", root / "served", {}))
    return inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    """Not to be changed."""
    return written(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> dict[str, Path]:
    """The last two of the prompts and problems. Not to be changed."""
    return written(tmp_path_factory.mktemp("few"), slice(-2, None))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, inputs) -> Callable[[str], tuple[Path, Attempt]]:
    """`whole(stage)`: the folder of an undisturbed stage, and what it asked. Not to be changed."""
    made: dict[str, tuple[Path, Attempt]] = {}

    def undisturbed(name: str) -> tuple[Path, Attempt]:
        if name not in made:
            out = tmp_path_factory.mktemp("whole") / "out"
            made[name] = out, attempt(name, out, inputs)
        return made[name]

    return undisturbed


def are_equal(name: str, one: Path, other: Path) -> bool:
    return contents(one, STAGES[name].outputs) == contents(other, STAGES[name].outputs)


@pytest.mark.parametrize("name", STAGES)
def test_nothing_depends_on_batches(tmp_path, inputs, whole, name):
    folder, usual = whole(name)
    for batch in (1, 100):
        other = attempt(name, tmp_path / f"{batch}" / "out", inputs, batch)
        assert Counter(other.asked) == Counter(usual.asked)
        assert are_equal(name, tmp_path / f"{batch}" / "out", folder)
    assert usual.result is not None and set(STAGES[name].outputs) <= set(usual.result.outputs)
    assert all((folder / output).exists() for output in usual.result.outputs)


@pytest.mark.parametrize("name", STAGES)
def test_a_question_depends_on_seed_prompt_and_sample_alone(tmp_path, inputs, few, whole, name):
    _, usual = whole(name)
    assert set(Counter(seed for _, seed in usual.asked).values()) == {STAGES[name].models}
    assert all(0 <= seed < 2**63 for _, seed in usual.asked)
    # Of rewriting, what is asked depends on what the samples before have solved.
    some = attempt(name, tmp_path / "some" / "out", few, **({} if "rewriting" in name else {"num_samples": 1}))
    assert some.asked and set(some.asked) < set(usual.asked)
    for other in ({"seed": 8}, {"number": 2})[: 2 if name == "sample" else 1]:
        asked = attempt(name, tmp_path / f"other-{other}" / "out", inputs, **other).asked
        assert {seed for _, seed in usual.asked}.isdisjoint(seed for _, seed in asked)


@pytest.mark.parametrize(
    ("name", "error", "kept"),
    [
        # A failure in the third batch waits for the one that is being graded; an interrupt waits for nothing.
        *((name, ClusterError, 8) for name in ("evaluate", "sweep", "difficulty", "sample")),
        *((name, KeyboardInterrupt, 4) for name in ("evaluate", "sweep", "difficulty", "sample")),
        # Its answers are graded once all of them are there; its first two batches are the first samples of all prompts.
        ("sample, taught", ClusterError, 6),
        ("sample, taught", KeyboardInterrupt, 6),
        # Each answer is saved as it comes: until the connection breaks, or the account is empty.
        ("evaluate, served", LostError, 9),
        ("evaluate, served", ConfigError, 9),
        ("sample, taught, served", ConfigError, 9),
        ("sample, rewriting, served", ConfigError, 9),
    ],
)
def test_what_ended_early_asks_for_the_rest_alone_and_ends_with_the_same_bytes(
    tmp_path, inputs, whole, name, error, kept
):
    folder, usual = whole(name)
    out = tmp_path / "workspace" / "out"
    first = attempt(name, out, inputs, answers=9 if name.endswith("served") else 8, error=error)
    second = attempt(name, out, inputs)
    if name.endswith("served"):
        assert len(first.asked) == kept
        assert Counter(first.asked) + Counter(second.asked) == Counter(usual.asked)
    else:
        assert second.asked == usual.asked[kept:]
        assert second.result is not None and second.result.resumed_from == kept
    assert are_equal(name, out, folder)
    assert attempt(name, out, inputs).asked == []
    assert are_equal(name, out, folder)
    keeps_samples = name.startswith(("evaluate", "sweep"))
    assert not (keeps_samples and [*out.glob("**/answers.jsonl")])


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("evaluate", ("suite longer: 4 of 4", "max_response_tokens")),
        ("sweep", ("suite longer: 4 of 4", "max_response_tokens")),
        ("difficulty", ("6 of 6", "data.max_prompt_tokens", "difficulty.max_response_tokens")),
        ("sample", ("6 of 6", "data.max_prompt_tokens", "sample.max_response_tokens")),
        ("sample, taught", ("6 of 6", "sample.teachers.own.max_response_tokens")),
    ],
)
def test_prompts_that_leave_no_room_are_refused_before_anything_is_asked(tmp_path, inputs, monkeypatch, name, named):
    monkeypatch.chdir(inputs["model"])
    monkeypatch.setattr(TransformersEngine, "from_folder", None)
    with refused(*named, error=DataError):
        STAGES[name].run(STAGES[name].settings(max_response_tokens=45), stage_context(name, tmp_path / "out", inputs))


MATH, EXACT = GradingConfig(kind=MathGrader(boxed="preferred")), SuiteConfig(grader=ExactGrader())
WARM = {"warm": DecodingConfig(temperature=0.5), **evaluating().evaluation.decodings}


@pytest.fixture
def again(tmp_path, inputs, whole) -> Callable[..., Attempt]:
    """Attempts a stage in the workspace of a finished one, and checks that it ends as one by itself."""

    def attempted(name: str, given: dict[str, Path] = inputs, **changes: object) -> Attempt:
        if not (first := tmp_path / "workspace" / "first").exists():
            shutil.copytree(whole(name)[0], first)
        found = attempt(name, first.with_name("second"), given, **changes)
        attempt(name, tmp_path / "fresh" / "second", given, **changes)
        assert are_equal(name, first.with_name("second"), tmp_path / "fresh" / "second")
        return found

    return attempted


@pytest.mark.parametrize(
    ("name", "changes", "asked"),
    [
        ("evaluate", {"confidence": 0.8}, 0),
        ("evaluate", {"grading": MATH}, 0),
        ("evaluate", {"suites": {"base": EXACT}}, 0),
        ("evaluate", {"decodings": WARM}, 8),
        ("evaluate", {"suites": {"base": SuiteConfig(num_samples=3)}}, 12),
        ("evaluate", {"suites": {"longer": SuiteConfig(template="none")}}, 12),
        ("evaluate", {"max_response_tokens": 15}, 24),
        ("evaluate", {"stop": ("1",)}, 24),
        ("evaluate", {"dtype": "bfloat16"}, 24),
        ("evaluate", {"seed": 8}, 24),
        ("sweep", {"grading": MATH}, 0),
        ("evaluate, served", {"num_samples": 3}, 8),
        ("difficulty", {"min_pass_rate": 0.25, "max_pass_rate": 0.75}, 0),
        ("difficulty", {"max_response_tokens": 15}, 24),
        ("sample", {"keep": {"choose": "shortest", "max_per_prompt": 1}}, 0),
        ("sample", {"temperature": 0.5}, 24),
        ("sample, taught, served", {"num_samples": 1}, 0),
    ],
)
def test_what_would_be_drawn_as_before_is_only_graded(tmp_path, again, name, changes, asked):
    assert len(again(name, **changes).asked) == asked
    if name == "evaluate":
        last = progress_of(tmp_path / "workspace" / "second")
        assert last.step == last.total
        first, second = (contents(tmp_path / "workspace" / which, OUTPUTS) for which in ("first", "second"))
        assert asked or first["results.json"] != second["results.json"]
        assert (first["responses.json"] == second["responses.json"]) == (asked == 0), "hashes say nothing of grading"
        assert len({line["digest"] for line in json.loads(first["responses.json"])}) == 4


@pytest.mark.parametrize(("suite", "count", "asked"), [("more", 4, 12), ("base", 5, 15), (None, 0, 24)])
def test_other_problems_are_drawn_alone_and_another_model_anew(tmp_path, inputs, again, suite, count, asked):
    own = {name: shutil.copytree(folder, tmp_path / name) for name, folder in inputs.items()}
    if suite is None:
        write_wide_model(own["model"] / "model", seed=1)
        write_finished(own["model"], "sft", "sft", "sft", ("model",))
    else:
        write_prompts(own["data"] / "suites" / f"{suite}.parquet", problems(count))
    assert len(again("evaluate", own).asked) == asked


def test_pass_rates_of_other_data_or_of_a_discarded_stage_are_no_answers(tmp_path, inputs, few, whole):
    shutil.copytree(whole("difficulty")[0], tmp_path / ".trash-first")
    assert len(attempt("difficulty", tmp_path / "second", inputs).asked) == 24
    assert len(attempt("difficulty", tmp_path / "third", few).asked) == 8


def break_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def other_responses(path: Path) -> None:
    """Another evaluation's samples under this one's hashes; the manifest knows no better."""
    shutil.copy(path.parents[1] / "eighth" / SAMPLES_FILE, path)
    write_finished(path.parent, "evaluate", "it", path.parent.name, OUTPUTS)


def another_seed(path: Path) -> None:
    """In the last response to the first suite, after some that are counted."""
    records = list(read_samples_of(path.parent))
    write_sample_records(path, [*records[:3], replace(records[3], seed=1), *records[4:]])
    write_finished(path.parent, "evaluate", "it", path.parent.name, OUTPUTS)


def discard(path: Path) -> None:
    """As a deletion that was interrupted leaves it."""
    path.parent.rename(path.parent.with_name(f".trash-{path.parent.name}"))


@pytest.mark.parametrize("damage", [Path.unlink, break_off, other_responses, another_seed, discard, None])
def test_an_evaluation_that_does_not_count_or_is_of_other_code_is_not_taken_from(
    tmp_path, inputs, whole, monkeypatch, damage
):
    monkeypatch.setattr(evaluate, "_REGRADING_BATCH", 1)
    first, known = tmp_path / "first", evaluate.code_of
    shutil.copytree(whole("evaluate")[0], first)
    attempt("evaluate", tmp_path / "eighth", inputs, seed=8)
    if damage is None:
        monkeypatch.setattr(evaluate, "code_of", lambda kind, rooms: {**known(kind, rooms), "rollout": "edited"})
    else:
        damage(first / SAMPLES_FILE)
    second = attempt("evaluate", tmp_path / "second", inputs)
    assert (len(second.asked), second.result.resumed_from) == (24, 0)
    assert damage is None or are_equal("evaluate", tmp_path / "second", whole("evaluate")[0])


def test_what_an_evaluation_has_begun_itself_is_kept_and_the_rest_adopted(tmp_path, again):
    own = tmp_path / "workspace" / "second"
    for folder in (own, tmp_path / "fresh" / "second"):
        folder.mkdir(parents=True)
        answer = ModelAnswer("it is 5", 4, FinishReason.STOP, grade=Grade(Outcome.WRONG, "5"), grader="math")
        store = AnswerStore(folder / "answers.jsonl")
        store.add([(sample_key("longer", "greedy", "p0", 0), answer)])
        store.close()
    assert again("evaluate", confidence=0.8).asked == []
    mine, *others = read_samples_of(own)
    assert (mine.uid, mine.response) == ("p0", "it is 5")
    assert [each.response for each in others] == [each.response for each in read_samples_of(own.parent / "first")][1:]
