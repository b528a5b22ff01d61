"""What the UI shows of each stage, and how it gets to Prefect."""

import json
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
from support.patience import wait_until
from synthetic.finished_chain import write_chain

from luffy.config import CHAIN_KINDS, load_experiment
from luffy.tasks import artifacts as module
from luffy.tasks.artifacts import Artifact, Publisher, stage_page
from luffy.tasks.session import artifact_key, run_name, tags_of


def plan(directory, stage, name=None):
    return SimpleNamespace(directory=directory, node=SimpleNamespace(name=name or stage, stage=stage))


def test_a_stage_that_learns_has_a_page_with_its_curves_its_newest_step_an_earlier_one_and_the_first(tmp_path):
    _, folders = write_chain(tmp_path / "chain", num_problems=20, num_steps=40)
    page = stage_page(plan(folders["rl"], "rl"))
    header, _, *rows = page.text.partition("\n\n")[0].splitlines()
    names, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, *rows)]
    written = [json.loads(line) for line in (folders["rl"] / "metrics.jsonl").read_text().splitlines()]
    written = written[1:]  # without the validation before training
    shown = [f"{written[index]['reward/mean']:.4g}" for index in (-1, -11, 0)]
    assert (names, rows[0]) == (["metric", "now", "before", "first"], ["reward/mean", *shown])
    assert {name for name, *_ in rows} == set(written[-1]) - {"step"}
    assert page.description == "Metrics of rl (now: step 40, before: step 30, first: step 1)"
    assert page.text.count("data:image/svg+xml") == 1


@pytest.mark.parametrize(("stage", "file"), [("report", "report"), ("evaluate_sft", "summary"), ("sweep", "curve")])
def test_a_stage_with_a_page_shows_its_text_and_names_the_one_with_the_plots(tmp_path, stage, file):
    (tmp_path / "summary.md").write_text("# smoke")
    (tmp_path / f"{file}.html").write_text("<svg>")
    page = stage_page(plan(tmp_path, stage.partition("_")[0], stage)).text
    assert page == f"With all plots, to open in a browser: `{tmp_path}/{file}.html`\n\n# smoke"


def test_a_stage_that_has_written_nothing_yet_shows_nothing(tmp_path):
    assert [stage for stage in CHAIN_KINDS if stage_page(plan(tmp_path, stage)) is not None] == []


def test_keys_and_names_say_experiment_and_method():
    assert artifact_key("qwen2.5_math", "evaluate_rl") == "qwen2-5-math-evaluate-rl"
    assert run_name("exp_configs/smoke.yaml", ["method=on_policy", "rl.steps=8"]) == "smoke on_policy rl.steps=8"
    assert run_name("none.yaml", ["a=1"]) == "none a=1"
    assert run_name("none.yaml", [f"a={'1' * 99}"]) == f"none a={'1' * 50}..."
    assert tags_of(load_experiment("smoke")) == ["experiment:smoke", "method:luffy", "chain:sft_then_luffy"]


TASK, PAGE = uuid.uuid4(), "smoke-rl"


class Records:
    """A writer that remembers, and does as it is told first."""

    def __init__(self, before=lambda: None):
        self.created, self.updated, self.asked = [], [], 0
        self.before = before

    def __call__(self, task_run, key, artifact, identifier):
        self.asked += 1
        self.before()
        if identifier is None:
            self.created.append((key, artifact.text))
            return uuid.uuid4()
        self.updated.append(artifact.text)
        return identifier


def page(text):
    return lambda: Artifact(str(text), "")


def test_a_page_is_created_once_and_then_its_newest_offer_takes_its_place_at_the_latest_at_the_end():
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(TASK, PAGE, page(0))
        wait_until(lambda: records.created)
        for value in range(1, 501):
            publisher.offer(TASK, PAGE, page(value))
        publisher.offer(TASK, "other", page(3))
    assert (records.created, records.updated) == ([(PAGE, "0"), ("other", "3")], ["500"])


def test_a_page_without_content_a_view_that_raises_and_an_api_that_does_cost_artifacts_and_nothing_else():
    def fail():
        raise RuntimeError("no such file, or no such server")

    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(TASK, PAGE, lambda: None)
        publisher.offer(TASK, "other", fail)
    assert records.created == [] and not records.asked
    records = Records(before=fail)
    with Publisher(records) as publisher:
        publisher.offer(TASK, PAGE, page(1))
    assert records.asked and not records.created


@pytest.mark.parametrize("newer", [None, "100"])
def test_the_last_artifact_survives_a_hiccup_of_the_api(monkeypatch, newer):
    monkeypatch.setattr(module, "_REST_S", 0.1)
    hiccups = [True]

    def fail_once():
        if hiccups:
            hiccups.pop()
            raise ConnectionError("the server is starting again")

    records = Records(before=fail_once)
    with Publisher(records) as publisher:
        publisher.offer(TASK, PAGE, page(99))
        wait_until(lambda: not hiccups)
        if newer:
            publisher.offer(TASK, PAGE, page(newer))
        wait_until(lambda: records.created)
    assert records.created == [(PAGE, newer or "99")]
    assert records.updated == []


def test_an_api_that_hangs_holds_up_neither_the_offers_nor_the_end(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    answer = threading.Event()
    with Publisher(Records(before=answer.wait)) as publisher:
        for value in range(1000):
            publisher.offer(TASK, PAGE, page(value))
    answer.set()  # not before: whoever waited for it would wait for ever


def test_the_end_waits_for_what_is_on_its_way():
    records = Records(before=lambda: time.sleep(0.05))
    with Publisher(records) as publisher:
        for index in range(5):
            publisher.offer(TASK, f"view-{index}", page(1))
    assert len(records.created) == 5
