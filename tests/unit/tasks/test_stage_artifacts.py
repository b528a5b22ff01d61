"""What the UI shows of each stage, and how artifacts get to Prefect; of a confidential benchmark nothing."""

import json
import re
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.patience import wait_until
from synthetic.finished_chain import HOSTILE, write_chain
from synthetic.result_rows import sample_record

from luffy.config import CHAIN_KINDS, STAGE_KINDS
from luffy.evaluation.sample_files import write_sample_records
from luffy.tasks import artifacts
from luffy.tasks import artifacts as module
from luffy.tasks.artifacts import Artifact, Publisher, Slot, stage_page
from luffy.tasks.session import artifact_key, run_name, tags_of


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chain"), num_problems=20, num_steps=40)


def plan(chain, name, **inputs):
    _, directories = chain
    stage = name.partition("_")[0] if name.startswith("evaluate_") else name
    directory = directories.get("data" if name == "prepare_data" else name, Path("not-there"))
    return SimpleNamespace(directory=directory, inputs=inputs, node=SimpleNamespace(name=name, stage=stage))


def rows_of(artifact):
    """The rows of a Markdown table, which comes first, as mappings."""
    lines = artifact.data.partition("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_a_stage_has_one_page_with_all_that_it_shows(chain):
    assert all(kind.views or kind.text for kind in STAGE_KINDS.values())
    page = stage_page(plan(chain, "rl"))
    assert (page.kind, page.data.count("data:image/svg+xml")) == ("markdown", 1)
    headings = re.findall(r"^## (.*)", page.data, re.MULTILINE)
    assert headings[0].startswith("Metrics of rl (now: step 40")
    assert headings[1:] == ["Newest rollouts of rl, with their grades"]


def test_the_table_of_metrics_has_the_newest_step_an_earlier_one_and_the_first(chain):
    artifact = artifacts.training(plan(chain, "rl"))
    rows = rows_of(artifact)
    written = [json.loads(line) for line in (chain[1]["rl"] / "metrics.jsonl").read_text().splitlines()]
    written = written[1:]  # without the validation before training
    assert rows[0] == {
        "metric": "reward/mean",
        "now": f"{written[-1]['reward/mean']:.4g}",
        "before": f"{written[-11]['reward/mean']:.4g}",
        "first": f"{written[0]['reward/mean']:.4g}",
    }
    assert {row["metric"] for row in rows} == set(written[-1]) - {"step"}
    assert "now: step 40, before: step 30, first: step 1" in artifact.description


@pytest.mark.parametrize(("stage", "file"), [("report", "report"), ("evaluate_sft", "summary"), ("sweep", "curve")])
def test_a_stage_with_a_page_shows_its_text_and_names_the_one_with_the_plots(tmp_path, stage, file):
    (tmp_path / "summary.md").write_text("# smoke")
    (tmp_path / f"{file}.html").write_text("<svg>")
    node = SimpleNamespace(name=stage, stage=stage.partition("_")[0])
    page = stage_page(SimpleNamespace(directory=tmp_path, node=node)).data
    assert page == f"With all plots, to open in a browser: `{tmp_path}/{file}.html`\n\n# smoke"


def test_rollouts_are_shown_with_prompt_response_and_grade(chain):
    page = artifacts.rollout_samples(plan(chain, "rl")).data
    assert re.search(r"### Step \d+, (rollout|demonstration): \*\*\w+\*\*, reward", page)
    assert page.count("### Step") == page.count("\nPrompt\n") == page.count("\nResponse\n") <= 4


def test_what_a_model_says_cannot_leave_its_block_and_is_cut_in_the_middle(chain, tmp_path):
    row = {"step": 1, "uid": "a", "response": HOSTILE, "source": "on_policy", "reward": 0.0, "outcome": "wrong"}
    row["prompt"] = "p" * 3000 + "q" * 3000
    (tmp_path / "samples.jsonl").write_text(json.dumps({**row, "advantage": None}) + "\n")
    page = artifacts.rollout_samples(SimpleNamespace(directory=tmp_path, node=SimpleNamespace(name="rl"))).data
    assert f"````\n{HOSTILE}\n````" in page
    assert "p\n[... 2000 characters left out ...]\nq" in page and len(page) < 4500


def test_evaluated_samples_show_a_right_and_a_wrong_response_of_each_suite(chain):
    page = artifacts.evaluated_samples(plan(chain, "evaluate_sft")).data
    for suite in ("in_distribution", "longer", "other_mix", "retention"):
        grades = re.findall(rf"### {suite}, \w+: \*\*(\w+)\*\*", page)
        assert len(grades) == 2 and grades.count("correct") == 1


@pytest.mark.parametrize("mark", [{"confidential": True}, {"suite": "gpqa_diamond"}, {"suite": "my GPQA"}])
def test_nothing_of_a_confidential_benchmark_is_shown(tmp_path, mark):
    record = sample_record("open", "u", prompt="SECRET")
    directory = SimpleNamespace(directory=tmp_path, node=SimpleNamespace(name="evaluate_rl"))
    write_sample_records(tmp_path / "samples.jsonl.zst", [replace(record, **mark)])
    assert artifacts.evaluated_samples(directory) is None
    write_sample_records(tmp_path / "samples.jsonl.zst", [record])
    assert "SECRET" in artifacts.evaluated_samples(directory).data


def test_a_stage_that_has_written_nothing_yet_shows_nothing(tmp_path):
    for stage in CHAIN_KINDS:
        empty = SimpleNamespace(directory=tmp_path, inputs={}, node=SimpleNamespace(name=stage, stage=stage))
        assert stage_page(empty) is None


def test_keys_and_names_say_experiment_and_method(chain):
    assert artifact_key("qwen2.5_math", "evaluate_rl") == "qwen2-5-math-evaluate-rl"
    assert run_name("exp_configs/smoke.yaml", ["method=on_policy", "rl.steps=8"]) == "smoke on_policy rl.steps=8"
    assert run_name("none.yaml", ["a=1"]) == "none a=1"
    assert run_name("none.yaml", [f"a={'1' * 99}"]) == f"none a={'1' * 50}..."
    assert tags_of(chain[0]) == ["experiment:arithmetic", "method:luffy", "chain:sft_then_luffy"]


SLOT = Slot(uuid.uuid4(), "smoke-rl-progress")


class Records:
    """A writer that remembers, and does as it is told first."""

    def __init__(self, before=lambda: None):
        self.created, self.updated, self.written_at, self.asked = [], [], [], 0
        self.before = before

    def __call__(self, slot, artifact, identifier):
        self.asked += 1
        self.before()
        self.written_at.append(time.monotonic())
        if identifier is None:
            self.created.append((slot.key, artifact.data))
            return uuid.uuid4()
        self.updated.append(artifact.data)
        return identifier


def percent(value):
    return lambda: Artifact("progress", value, "")


def test_a_slot_is_created_once_and_updated_from_then_on():
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(1.0))
        wait_until(lambda: records.created)
        publisher.offer(SLOT, percent(2.0))
        publisher.offer(Slot(SLOT.task_run, "other"), percent(3.0))
    assert records.created == [("smoke-rl-progress", 1.0), ("other", 3.0)]
    assert records.updated == [2.0]


def test_between_two_writes_only_the_newest_offer_counts_and_the_last_one_is_written_at_the_end(monkeypatch):
    monkeypatch.setattr(module, "_REST_S", 60.0)
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(0.0))
        wait_until(lambda: records.created)
        for value in range(1, 500):
            publisher.offer(SLOT, percent(float(value)))
        publisher.offer(SLOT, percent(500.0))
    assert records.updated == [500.0]


def test_nothing_is_written_as_long_as_there_is_nothing_to_show():
    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, lambda: None)
    assert records.created == [] and not records.asked


def test_a_view_or_an_api_that_raises_costs_artifacts_and_nothing_else():
    def fail():
        raise RuntimeError("no such file, or no such server")

    records = Records(before=fail)
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(1.0))
        publisher.offer(Slot(SLOT.task_run, "other"), fail)
    assert records.asked and not records.created


@pytest.mark.parametrize("newer", [None, 100.0])
def test_the_last_artifact_survives_a_hiccup_of_the_api(monkeypatch, newer):
    monkeypatch.setattr(module, "_PAUSE_AFTER_FAILURE_S", 0.1)
    hiccups = [True]

    def fail_once():
        if hiccups:
            hiccups.pop()
            raise ConnectionError("the server is starting again")

    records = Records(before=fail_once)
    with Publisher(records) as publisher:
        publisher.offer(SLOT, percent(99.0))
        wait_until(lambda: not hiccups)
        if newer:
            publisher.offer(SLOT, percent(newer))
        wait_until(lambda: records.created)
    assert records.created == [("smoke-rl-progress", newer or 99.0)]
    assert records.updated == []


def test_an_api_that_hangs_holds_up_neither_the_offers_nor_the_end(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    answer = threading.Event()
    with Publisher(Records(before=answer.wait)) as publisher:
        for value in range(1000):
            publisher.offer(SLOT, percent(float(value)))
    answer.set()  # not before: whoever waited for it would wait for ever


def test_dear_views_are_made_less_often(monkeypatch):
    """A view of 20 ms rests for a second: under 2 % of a core."""
    monkeypatch.setattr(module, "_REST_S", 0.0)

    def dear():
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return Artifact("progress", 1.0, "")

    records = Records()
    with Publisher(records) as publisher:
        publisher.offer(SLOT, dear)
        wait_until(lambda: records.created)
        publisher.offer(SLOT, dear)
        wait_until(lambda: records.updated)
    first, second = records.written_at
    assert second - first > 0.9


@pytest.mark.parametrize("slots", [1, 5])
def test_the_end_waits_for_what_is_on_its_way(slots):
    records = Records(before=lambda: time.sleep(0.05))
    with Publisher(records) as publisher:
        for index in range(slots):
            publisher.offer(Slot(SLOT.task_run, f"view-{index}"), percent(1.0))
    assert len(records.created) == slots
