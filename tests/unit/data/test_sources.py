"""Sources: the hub, reasoning-gym, sources of the user's own, mixtures, the shipped recipes, and the benchmarks and
samples that they read. No text of real data sets is asserted or shown."""

import json
import re
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter
from support.installed import DATASETS, needs_datasets
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.loaded_source import load_file, load_source, write_rows
from synthetic.preparation import row

from luffy.config import load_experiment
from luffy.config.data import CustomSource, FileSource, HubSource, MixtureSource, ReasoningGymSource, SourceConfig
from luffy.config.grading import ChoiceGrader, GradingConfig, ReasoningGymGrader
from luffy.config.load import resolve_recipes
from luffy.config.settings import PrepareDataSettings
from luffy.config.shipped import recipe_files
from luffy.data.row_filters import check_golds, grade_traces
from luffy.data.sources import mixed_in
from luffy.data.sources.column_mapping import prompt_from_fields
from luffy.errors import ConfigError, DataError
from luffy.grading.pool import GraderPool
from luffy.grading.programs import cases_of
from luffy.grading.request import GradeRequest, problem_of
from luffy.pipeline.graph import build_graph
from luffy.pipeline.outside import outside_files
from luffy.types import Outcome

REPOSITORY = Path(__file__).resolve().parents[3]
QA = {"data_source": "qa", "problem": "q", "answer": {"column": "a"}, "traces": ({"column": "t"},)}
ROW = row("1+1", "<think>\n2</think>\\boxed{2}")


@pytest.fixture
def offline(monkeypatch, tmp_path):
    pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.IN_MEMORY_MAX_SIZE", 1 << 30)  # of HF_DATASETS_IN_MEMORY_MAX_SIZE


def hub(path, **more):
    return HubSource.model_validate({"kind": "hub", "path": str(path), "fields": QA, **more})


@pytest.fixture(params=["jsonl", "csv", "parquet", "hub"])
def stored(request, tmp_path):
    """Makes a source of the rows that it gets, with these settings."""
    if request.param == "hub":
        request.getfixturevalue("offline")

    def store(*rows, **settings):
        if request.param != "hub":
            path = write_rows(tmp_path / f"d.{request.param}", *rows)
            return FileSource.model_validate({"kind": "file", "path": str(path), "fields": QA, **settings})
        folder = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
        return hub(write_rows(folder / "train-00000-of-00001.parquet", *rows).parent, **settings)

    return store


structured = pytest.mark.parametrize("stored", ["jsonl", "parquet", "hub"], indirect=True)
"""For columns that CSV can only hold as text."""


def test_the_same_rows_in_any_format_are_the_same_prompts(stored):
    rows = [{"q": f'{n} "and",\nmore', "a": str(n), "t": f"\\boxed{{{n}}}", "unused": n} for n in range(600)]
    rows.append({"q": None, "a": "1", "t": "x", "unused": 0})
    loaded = load_source(stored(*rows))
    read = [{"q": prompt.messages[0].content, "a": prompt.ground_truth} for prompt in loaded.prompts]
    assert read == [{"q": row["q"], "a": row["a"]} for row in rows[:600]]
    assert loaded.prompts[5].traces[0].text == "\\boxed{5}"
    assert [(bad.row, bad.field) for bad in loaded.quarantined] == [(601, "q")]
    assert load_source(stored(*rows, max_rows=7)).prompts == loaded.prompts[:7]


def test_other_rows_are_another_input(stored):
    two, three = (load_source(stored({"q": "1+1", "a": answer, "t": "x"})).inputs.values() for answer in "23")
    assert not {*two} & {*three}


@structured
def test_luffys_columns_need_no_fields_and_a_misspelt_one_is_found(stored):
    (prompt,) = load_source(stored(ROW, fields=None, author="r1")).prompts
    assert (prompt.data_source, prompt.traces[0].author, prompt.ground_truth) == ("t", "r1", "2")
    for column, meant in (("targte", "target"), ("trace", "traces")):
        misspelt = {(column if name == "target" else name): value for name, value in ROW.items()}
        with refused("none of its 1 rows", f"field {column}", f"'{meant}'", error=DataError):
            load_source(stored(misspelt, fields=None))


@structured
def test_rows_are_filtered_and_their_questions_have_options(stored):
    options = {"text": ["x", "y"], "label": ["1", "2"]}
    rows = [{"q": f"Q{n}", "choices": options, "a": "2", "subject": "ab"[n % 2]} for n in range(600)]
    choices = {"column": "choices.text", "labels": "choices.label"}
    fields = {"data_source": "quiz", "problem": "q", "choices": choices, "answer": {"column": "a"}}
    only = {"fields": fields, "only": {"subject": "b"}}
    prompts = load_source(stored(*rows, max_rows=3, confidential=True, **only)).prompts
    assert [prompt.messages[0].content.split("\n")[0] for prompt in prompts] == ["Q1", "Q3", "Q5"]
    marks = {(prompt.ground_truth, prompt.grader, prompt.extra_info["confidential"]) for prompt in prompts}
    assert marks == {("B", "choice", True)}


@pytest.mark.parametrize("stored", ["csv", "parquet", "hub"], indirect=True)
def test_a_missing_column_is_refused_with_a_list_of_the_present_ones(stored):
    for named, columns, only in (
        ("column q, t missing; found question, a", {"question": "1", "a": "2"}, {}),
        ("column subject missing; found q", {"q": "1", "a": "2", "t": "3"}, {"subject": "b"}),
    ):
        with refused(named, error=DataError):
            load_source(stored(columns, only=only))


@pytest.mark.usefixtures("offline")
def test_a_date_that_python_does_not_have_is_one_bad_row_of_a_dataset(tmp_path):
    days = pa.array([None, 2**60], pa.timestamp("us"))
    table = pa.table({"q": ["1+1", "2+1"], "a": ["2", "3"], "t": [[], []], "day": days})
    (tmp_path / "d").mkdir()
    pq.write_table(table, tmp_path / "d/train-00000-of-00001.parquet")
    loaded = load_source(hub(tmp_path / "d", fields={**QA, "extra": ("day",)}))
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["2"]
    assert [(bad.row, bad.field) for bad in loaded.quarantined] == [(2, "day")]


@pytest.mark.usefixtures("offline")
def test_an_unreachable_hub_and_one_without_its_package_are_refused(monkeypatch):
    wanted = ("data.train: nobody/no-such-data (split train, revision main)", "kind: file", "HF_HUB_OFFLINE=1")
    with refused(*wanted, error=DataError):
        load_source(hub("nobody/no-such-data"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("pip install 'luffy-rl[hub]'", error=DataError):
        load_source(hub("openai/gsm8k"))


RIDDLES = """
from luffy.data.schema import prompt_uid
from luffy.types import Message, Prompt

class Riddles:
    kind, is_light = "riddles", False
    def __init__(self, count): self.count = count
    def inputs(self): return {"riddles": "0" * 64}
    def rows(self):
        for n in range(self.count):
            messages = (Message("user", f"riddle {n}"),)
            yield Prompt(prompt_uid("r", messages), "r", messages, str(n))

def riddles(purpose, seed, options): return Riddles(options["count"])
def broken(purpose, seed, options): return object()
"""


def test_a_custom_source_is_loaded_by_import_path_and_an_invalid_factory_refused(tmp_path, monkeypatch):
    (tmp_path / "my_riddles.py").write_text(RIDDLES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_riddles", raising=False)
    config = CustomSource(kind="custom", factory="my_riddles:riddles", options={"count": 3})
    assert [prompt.ground_truth for prompt in load_source(config).prompts] == ["0", "1", "2"]
    for factory, reason in (
        *((path, "cannot be imported") for path in ("my_riddles:nothing", "no_such_module:f")),
        ("my_riddles:broken", "without kind, is_light, inputs, rows"),
    ):
        with refused("data.train.factory", factory, reason, error=DataError):
            load_source(CustomSource(kind="custom", factory=factory))


def gym(**settings):
    return ReasoningGymSource.model_validate({"kind": "reasoning_gym", "num_prompts": 5, **settings})


def test_reasoning_gym_takes_its_tasks_in_turn():
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    config = gym(tasks=("chain_sum", "gcd"), options={"chain_sum": {"max_terms": 3}})
    one, again, other = (load_source(config, purpose).prompts for purpose in ("train", "train", "suites.a"))
    tasks = [prompt.data_source.removeprefix("reasoning_gym/") for prompt in one]
    assert tasks == ["chain_sum", "gcd", "chain_sum", "gcd", "chain_sum"]
    assert one == again != other
    assert all(prompt.ground_truth.lstrip("-").isdigit() and not prompt.traces for prompt in one)
    with refused("knight_swap", error=DataError):  # which differs from run to run
        load_source(gym(tasks=("knight_swap",)))


def test_reasoning_gym_scores_its_own_tasks_where_answers_have_many_forms():
    """Countdown accepts every expression that reaches the target, and partial scores are rewards."""
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    loaded = load_source(gym(tasks=("countdown", "rearc"), num_prompts=4, grader="gym"))
    assert [bad.field for bad in loaded.quarantined] == ["metadata"] * 2  # rearc does not come back from JSON
    prompt = loaded.prompts[0]
    assert prompt.grader == "gym"
    gold = prompt.ground_truth
    boxed, tag = rf"So \boxed{{({gold})}}.", f"So <answer>{gold}</answer>"
    responses = (f"<think>hm</think>{gold}", boxed, tag, f"{gold} + 99", "<think>hm")
    with GraderPool(1, PATIENCE_S, GradingConfig(named={"gym": ReasoningGymGrader()})) as pool:
        grades = pool.grade([GradeRequest(response, gold, problem_of(prompt)) for response in responses])
    assert [grade.outcome for grade in grades] == [*[Outcome.CORRECT] * 3, Outcome.WRONG, Outcome.NO_ANSWER]
    assert grades[0].reward == 1.0 and 0 < grades[3].reward < 1


SMOKE = REPOSITORY / "exp_configs/smoke.yaml"
STORIES = "{kind: guess_number, num_prompts: 5}"
SUMS = "{kind: arithmetic, num_prompts: 7, num_operations: [2]}"
PARTS = f"{{sums: {{weight: 3, source: {SUMS}}}, stories: {{source: {STORIES}}}}}"


def mixing(parts=PARTS, *overrides):
    mixture = f"data.train={{kind: mixture, parts: {parts}}}"
    return load_experiment(SMOKE, ["chain=rl", "method=luffy", mixture, *overrides])


def test_every_prompt_of_a_mixture_keeps_its_data_source_and_knows_its_part():
    source = mixing().data.train
    assert isinstance(source, MixtureSource)
    loaded = load_source(source, seed=1)
    assert (loaded.kind, len(loaded.prompts)) == ("mixture", 12)
    marks = [mixed_in(prompt.extra_info) for prompt in loaded.prompts]
    assert Counter(mark.part for mark in marks if mark) == {"sums": 7, "stories": 5}
    assert {tuple(mark.weights.items()) for mark in marks if mark} == {(("sums", 3.0), ("stories", 1.0))}
    assert len({prompt.data_source for prompt in loaded.prompts}) == 2
    alone = load_source(source.parts["stories"].source, seed=1)
    assert [prompt.data_source for prompt in alone.prompts] == [prompt.data_source for prompt in loaded.prompts[7:]]
    assert mixed_in(alone.prompts[0].extra_info) is None
    assert mixed_in({"mixture": {"name": "a user's own key"}}) is None
    changed = mixing(PARTS.replace("num_prompts: 5", "num_prompts: 6")).data.train
    assert load_source(changed, seed=1).inputs != loaded.inputs


def test_a_part_may_be_a_recipe_or_a_file_which_the_stage_declares(tmp_path):
    of_recipe = mixing(PARTS.replace(STORIES, "{kind: recipe, name: gsm8k}")).data.train.parts["stories"]
    assert (of_recipe.source.kind, of_recipe.weight) == ("hub", 1.0)
    file = tmp_path / "rows.jsonl"
    file.write_text("{}\n")
    graph = build_graph(mixing(PARTS.replace(STORIES, f"{{kind: file, path: {file}}}")))
    (settings,) = (node.settings for node in graph if isinstance(node.settings, PrepareDataSettings))
    assert any(name.startswith(f"{file.name} (") for name in outside_files(settings))


EQUAL_PROMPTS = "{kind: verifiers, environment: games, python: x, equal_prompts: true}"


@pytest.mark.parametrize(("parts", "overrides", "named"), [
    (PARTS, ["rl.sampling={kind: pools}"], "use one of them"),
    (f"{{sums: {{source: {SUMS}}}}}", [], "data.train.parts"),
    (PARTS.replace("weight: 3", "weight: 0"), [], "data.train.parts.sums.weight"),
    (PARTS.replace("guess_number", "guess_numbers"), [], "did you mean 'guess_number'?"),
    (PARTS.replace("guess_number", "word_problems"), [], "data/samples/word_problems_train.jsonl"),
    (PARTS.replace(STORIES, EQUAL_PROMPTS), [], "equal prompts count as repeats"),
])  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused(parts, overrides, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        mixing(parts, *overrides)


def recipe(name, **more):
    values = {"data": {"train": {"kind": "recipe", "name": name, **more}}}
    resolve_recipes(values, {}, "test.yaml")
    return TypeAdapter(SourceConfig).validate_json(json.dumps(values["data"]["train"]))


@pytest.mark.parametrize("name", recipe_files())
def test_every_shipped_recipe_is_a_valid_source(name):
    assert recipe(name).kind == "hub"
    assert recipe(name, file="copy.jsonl", max_rows=5).model_dump()["path"] == "copy.jsonl"


@pytest.mark.parametrize(("asked", "named"), [
    ({"name": "gsm9k"}, ["no recipe 'gsm9k'; did you mean gsm8k", "there are"]),
    ({"name": "aime42"}, ["no recipe 'aime42'; did you mean aime2", "there are"]),
    ({"name": "zzz"}, ["no recipe 'zzz'; there are"]), ({}, ["needs exactly one of name"]),
    ({"name": "gsm8k", "fiel": "x"}, ["unknown key 'fiel'"]),
])  # fmt: skip
def test_a_wrong_recipe_is_refused(asked, named):
    with refused("test.yaml: data.train", *named, error=ConfigError):
        resolve_recipes({"data": {"train": {"kind": "recipe", **asked}}}, {}, "test.yaml")


def benchmark(name, file):
    loaded = load_source(recipe(name, file=str(file)), "suites.b")
    assert not loaded.quarantined
    return loaded.prompts


def test_rows_in_the_formats_of_their_hubs_become_prompts_of_shipped_recipes(tmp_path):
    rows = [
        {"id": "a", "question": "Q1", "choices": {"text": ["w", "x", "y"], "label": ["A", "B", "C"]}, "answerKey": "C"},
        {"id": "b", "question": "Q2", "choices": {"text": list("wxyz"), "label": list("1234")}, "answerKey": "2"},
    ]
    one, two = benchmark("arc_challenge", write_rows(tmp_path / "arc.parquet", *rows))
    assert (one.ground_truth, two.ground_truth) == ("C", "B")
    assert two.messages[0].content == "Q2\n\nA. w\nB. x\nC. y\nD. z"

    incorrect = {f"Incorrect Answer {n}": f"w{n}" for n in (1, 2, 3)}
    row = {"Question": "Q", "Correct Answer": "r", **incorrect, "High-level domain": "Physics", "Writer": "n"}
    (prompt,) = benchmark("gpqa_diamond", write_rows(tmp_path / "gpqa.parquet", row))
    assert f"{prompt.ground_truth}. r" in prompt.messages[0].content.splitlines()
    assert prompt.extra_info["confidential"] is True and prompt.extra_info["High-level domain"] == "Physics"

    row = {
        "question": "Q", "final_answer": ["4.2", "5"], "subfield": "A", "answer_type": "Numerical",
        "is_multiple_answer": True, "unit": "%", "error": "1e-1",
    }  # fmt: skip
    (prompt,) = benchmark("olympiadbench", write_rows(tmp_path / "o.jsonl", row))
    assert prompt.ground_truth == "4.2, 5"
    assert (prompt.extra_info["unit"], prompt.extra_info["error"]) == ("%", "1e-1")

    # The reference of the second has lost its thousands.
    right = {"problem": "6 x 7?", "groud_truth_solution": "So \\boxed{42}", "boxed_answer_success": True}
    wrong = {"problem": "2 x 500?", "groud_truth_solution": "So \\boxed{1},000", "boxed_answer_success": False}
    rows = [{**each, "reasoning_solution": "Hm.\n</think>\nIt is \\boxed{42}."} for each in (right, wrong)]
    (prompt,) = load_source(recipe("gsm8k_r1", file=str(write_rows(tmp_path / "rows.jsonl", *rows)))).prompts
    assert (prompt.ground_truth, prompt.traces[0].author) == ("42", "DeepSeek-R1")
    assert prompt.traces[0].text.startswith("<think>")

    row = {"question": "Add.", "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}', "difficulty": "interview"}
    prompt = prompt_from_fields(row, recipe("apps").fields, author="")
    assert (prompt.grader, prompt.data_source, cases_of(prompt.ground_truth)[0].given) == ("code", "apps", "1 2")


@pytest.mark.parametrize(("name", "count"), [("shop_train", 60), ("shop_test", 100)])
def test_every_shipped_sample_is_well_formed_and_its_trace_correct(grader, name, count):
    loaded = load_file(REPOSITORY / f"data/samples/{name}.jsonl")
    assert (len(loaded.prompts), len(loaded.quarantined)) == (count, 0)
    assert {outcome for row in grade_traces(loaded.prompts, grader) for outcome in row} == {Outcome.CORRECT}


OF_LUFFY = "luffy_eval/valid.all.parquet"


@needs_datasets
@pytest.mark.parametrize(("name", "file", "num_rows", "num_problems"), [  # recipes, and what LUFFY's file has
    *((name, f"{name}/test.{ending}", count, count) for name, ending, count in (
        ("mmlu_pro", "parquet", 12_032), ("amc23", "jsonl", 40), ("olympiadbench", "jsonl", 675),
        ("aime24", "jsonl", 30), ("aime25", "jsonl", 30), ("math500", "jsonl", 500),
    )),
    ("gsm8k", "gsm8k/train.jsonl", 7473, 7473), ("math", "math_test5000/test.jsonl", 5000, 5000),
    ("aime", OF_LUFFY, 30 * 32, 30), ("aime25", OF_LUFFY, 30 * 32, 30), ("amc", OF_LUFFY, 83 * 32, 83),
    ("olympiad_bench", OF_LUFFY, 675, 675), ("math", OF_LUFFY, 500, 500), ("minerva", OF_LUFFY, 272, 272),
])  # fmt: skip
def test_real_benchmarks_have_their_published_number_of_problems(name, file, num_rows, num_problems):
    path, only = DATASETS / file, {"data_source": name}
    prompts = load_file(path, only=only).prompts if file == OF_LUFFY else benchmark(name, path)
    assert (len(prompts), len({prompt.uid for prompt in prompts})) == (num_rows, num_problems)


@needs_datasets
def test_mmlu_pro_has_three_to_ten_options_and_its_own_letters(grader):
    prompts = benchmark("mmlu_pro", DATASETS / "mmlu_pro/test.parquet")
    letters = pq.read_table(DATASETS / "mmlu_pro/test.parquet", columns=["answer"])["answer"].to_pylist()
    assert Counter(prompt.ground_truth for prompt in prompts) == Counter(letters)
    numbers = Counter(len(prompt.extra_info["options"]) for prompt in prompts)
    assert (min(numbers), max(numbers), numbers[10]) == (3, 10, 9982)
    assert numbers == Counter(prompt.extra_info["num_options"] for prompt in prompts)
    assert {finding for finding, _ in check_golds(prompts, grader, GradingConfig())} == {"meets_itself"}
    asked = []
    for prompt in prompts[:500]:
        text = prompt.extra_info["options"]["ABCDEFGHIJ".index(prompt.ground_truth)]
        asked.append(GradeRequest(f"\\boxed{{{text}}}", prompt.ground_truth, problem_of(prompt)))
    assert Counter(grade.outcome for grade in grader.grade(asked))[Outcome.WRONG] <= 5


@needs_datasets
@pytest.mark.parametrize(("name", "count"), [("arc_c", 1172), ("gpqa", 198)])
def test_the_published_multiple_choice_files_of_luffy_can_be_graded_by_choice(name, count):
    prompts = load_file(DATASETS / f"luffy_eval/valid.{name}.parquet", confidential=True).prompts
    config = GradingConfig(kind=ChoiceGrader())
    with GraderPool(1, PATIENCE_S, config=config) as grader:
        check = check_golds(prompts, grader, config)
    assert Counter(finding for finding, _ in check) == {"meets_itself": count}


@needs_datasets
def test_human_solutions_of_gsm8k_are_graded_correct(grader):
    prompts = load_source(recipe("gsm8k", file=str(DATASETS / "gsm8k/train.jsonl"), max_rows=300)).prompts
    assert {outcome for row in grade_traces(prompts, grader) for outcome in row} == {Outcome.CORRECT}
