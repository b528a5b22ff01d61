"""The hub, reasoning-gym and sources of the user's own."""

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.patience import PATIENCE_S

from luffy.config.data import CustomSource, HubSource, ReasoningGymSource
from luffy.config.grading import GradingConfig, ReasoningGymGrader
from luffy.data.sources import open_source
from luffy.errors import EXIT_USER_ERROR, DataError
from luffy.grading.pool import GraderPool
from luffy.grading.request import GradeRequest, problem_of
from luffy.types import Outcome
from tests.synthetic.loaded_source import load_source

FIELDS = {"data_source": "qa", "problem": "q", "answer": {"column": "a"}, "traces": ({"column": "t"},)}
MODULE = """
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


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs the package datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_riddles.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_riddles", None)


def hub(path: object, **more: object) -> HubSource:
    return HubSource.model_validate({"kind": "hub", "path": str(path), "fields": FIELDS, **more})


def write_folder(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    return folder


@pytest.mark.usefixtures("offline")
def test_a_local_folder_is_read_by_datasets(tmp_path: Path) -> None:
    rows = [{"q": f"{n}+1", "a": str(n + 1), "t": [f"\\boxed{{{n + 1}}}"], "unused": n} for n in range(600)]
    rows.append({"q": None, "a": "1", "t": [], "unused": 0})
    loaded = load_source(hub(write_folder(tmp_path / "d", rows)), "t", 0)
    assert [prompt.ground_truth for prompt in loaded.prompts] == [str(n + 1) for n in range(600)]
    assert loaded.prompts[5].traces[0].text == "\\boxed{6}"
    assert [(row.row, row.field, row.reason) for row in loaded.quarantined] == [(601, "q", "is missing")]
    assert len(load_source(hub(tmp_path / "d", max_rows=7), "t", 0).prompts) == 7


@pytest.mark.usefixtures("offline")
def test_a_date_that_python_does_not_have_is_one_bad_row_of_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    days = pa.array([None, 2**60], pa.timestamp("us"))
    table = pa.table({"q": ["1+1", "2+1"], "a": ["2", "3"], "t": [[], []], "day": days})
    pq.write_table(table, tmp_path / "d" / "train-00000-of-00001.parquet")
    loaded = load_source(hub(tmp_path / "d", fields={**FIELDS, "extra": ("day",)}), "t", 0)
    assert [prompt.ground_truth for prompt in loaded.prompts] == ["2"]
    assert [(row.row, row.field) for row in loaded.quarantined] == [(2, "day")]


@pytest.mark.usefixtures("offline")
def test_luffys_columns_need_no_fields(tmp_path: Path) -> None:
    row = {
        "data_source": "",
        "prompt": [{"role": "user", "content": "1+1"}],
        "target": [{"role": "assistant", "content": "<think>\n2</think>\\boxed{2}"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
    }
    (prompt,) = load_source(hub(write_folder(tmp_path / "d", [row]), fields=None, author="r1"), "t", 0).prompts
    assert (prompt.data_source, prompt.traces[0].author, prompt.ground_truth) == ("", "r1", "2")
    misspelt = {("targets" if name == "target" else name): value for name, value in row.items()}
    with pytest.raises(DataError, match="field targets: is no column; did you mean 'target'"):
        load_source(hub(write_folder(tmp_path / "misspelt", [misspelt]), fields=None), "t", 0)


@pytest.mark.usefixtures("offline")
def test_rows_of_a_dataset_are_filtered_and_its_questions_have_options(tmp_path: Path) -> None:
    options = {"text": ["x", "y"], "label": ["1", "2"]}
    rows = [{"q": f"Q{n}", "choices": options, "a": "2", "subject": "ab"[n % 2]} for n in range(600)]
    choices = {"column": "choices.text", "labels": "choices.label"}
    fields = {"data_source": "quiz", "problem": "q", "choices": choices, "answer": {"column": "a"}}
    only = {"fields": fields, "only": {"subject": "b"}}
    source = hub(write_folder(tmp_path / "d", rows), max_rows=3, confidential=True, **only)
    prompts = load_source(source, "t", 0).prompts
    assert [prompt.messages[0].content.split("\n")[0] for prompt in prompts] == ["Q1", "Q3", "Q5"]
    marks = {(prompt.ground_truth, prompt.grader, prompt.extra_info["confidential"]) for prompt in prompts}
    assert marks == {("B", "choice", True)}
    bare = write_folder(tmp_path / "e", [{"q": "1", "choices": 1, "a": "2"}])
    with pytest.raises(DataError, match="column subject missing; found q"):
        open_source(hub(bare, **only), "t", 0)


@pytest.mark.usefixtures("offline")
def test_an_unreachable_hub_is_one_line_with_a_hint() -> None:
    with pytest.raises(DataError) as caught:
        open_source(hub("nobody/no-such-data"), "train", 0)
    text = str(caught.value)
    assert text.startswith("data.train: nobody/no-such-data (split train, revision main) cannot be loaded: ")
    assert "give a local copy (kind: file" in text and "HF_HUB_OFFLINE=1" in text
    assert "\n" not in text
    assert caught.value.exit_code == EXIT_USER_ERROR


def test_without_datasets_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'luffy-rl\[hub\]'"):
        open_source(hub("openai/gsm8k"), "train", 0)


@pytest.mark.usefixtures("module")
def test_a_custom_source_is_loaded_by_import_path() -> None:
    config = CustomSource(kind="custom", factory="my_riddles:riddles", options={"count": 3})
    assert [prompt.ground_truth for prompt in load_source(config, "train", 0).prompts] == ["0", "1", "2"]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("my_riddles:nothing", "cannot be imported"),
        ("no_such_module:f", "cannot be imported"),
        ("my_riddles:broken", "returned a object without kind, is_light, inputs, rows"),
    ],
)
def test_an_invalid_factory_is_refused(factory: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"data.train.factory: {factory} {reason}"):
        open_source(CustomSource(kind="custom", factory=factory), "train", 0)


def gym(**settings: object) -> ReasoningGymSource:
    return ReasoningGymSource.model_validate({"kind": "reasoning_gym", "num_prompts": 5, **settings})


def test_reasoning_gym_takes_its_tasks_in_turn() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    config = gym(tasks=("chain_sum", "gcd"), options={"chain_sum": {"max_terms": 3}})
    one, again, other = (load_source(config, purpose, 0).prompts for purpose in ("train", "train", "suites.a"))
    tasks = [prompt.data_source.removeprefix("reasoning_gym/") for prompt in one]
    assert tasks == ["chain_sum", "gcd", "chain_sum", "gcd", "chain_sum"]
    assert one == again != other
    assert all(prompt.ground_truth.lstrip("-").isdigit() and not prompt.traces for prompt in one)


def test_tasks_that_differ_from_run_to_run_are_refused() -> None:
    with pytest.raises(DataError, match="knight_swap differ from run to run"):
        open_source(gym(tasks=("knight_swap",)), "train", 0)


def test_reasoning_gym_scores_its_own_tasks_where_answers_have_many_forms() -> None:
    """Countdown accepts every expression that reaches the target, and partial scores are rewards."""
    pytest.importorskip("reasoning_gym", reason="needs the package reasoning-gym")
    config = gym(tasks=("countdown", "rearc"), num_prompts=4, grader="gym")
    loaded = load_source(config, "train", 0)
    assert [row.field for row in loaded.quarantined] == ["metadata"] * 2  # rearc does not come back from JSON
    prompt = loaded.prompts[0]
    assert prompt.grader == "gym"
    grading = GradingConfig(named={"gym": ReasoningGymGrader()})

    gold = prompt.ground_truth
    boxed, tag = rf"So \boxed{{({gold})}}.", f"So <answer>{gold}</answer>"
    responses = (f"<think>hm</think>{gold}", boxed, tag, f"{gold} + 99", "<think>hm")
    with GraderPool(1, PATIENCE_S, grading) as pool:
        grades = pool.grade([GradeRequest(response, gold, problem_of(prompt)) for response in responses])
    right, other_form, tagged, wrong, open_reasoning = grades
    assert [grade.outcome for grade in (right, other_form, tagged)] == [Outcome.CORRECT] * 3
    assert right.reward == 1.0
    assert wrong.outcome is Outcome.WRONG and 0 < wrong.reward < 1
    assert open_reasoning.outcome is Outcome.NO_ANSWER
