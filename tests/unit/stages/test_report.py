"""The stage `report`: one file that stands alone, says what happened, and trusts no text from a model."""

import json
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from synthetic.answered_stage import stage_context
from synthetic.finished_chain import HOSTILE, write_chain
from synthetic.pages import stands_alone

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.settings import ReportSettings
from luffy.data.answer_cards import (
    KeptCount,
    PassRate,
    TaughtCard,
    TeacherCard,
    card_json,
    difficulty_card,
    fit_of,
    sample_card,
    summarise_rates,
)
from luffy.errors import LuffyError
from luffy.pipeline.manifest import finished_manifest, write_manifest
from luffy.report.cards import card_markdown, difficulty_section, taught_section
from luffy.report.chain_page import FinishedChain, chain_page, difference_table, read_chain
from luffy.report.page import Page, markdown
from luffy.stages import report as stage
from luffy.statistics.paired import holm

Chain = tuple[ExperimentConfig, dict[str, Path]]
RATES = [PassRate(f"p{i}", {"correct": i, "wrong": 4 - i}, num_tokens=20, num_truncated=i) for i in range(5)]
ASKED = "4 a prompt, temperature 1, at most 8 tokens | 50.0 | 80.0 | 5.0 | 50.0 | correct 10, wrong 10"


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Chain:
    return write_chain(tmp_path_factory.mktemp("chain"), num_problems=30, num_steps=40)


def report(chain: Chain, out: Path, *without: str) -> tuple[str, str]:
    """The page of the chain, as HTML and as text."""
    config, inputs = chain
    kept = {name: path for name, path in inputs.items() if name not in without}
    pages = list[Page]()

    def drawn(chain: FinishedChain) -> Page:
        pages.append(chain_page(chain))
        return pages[-1]

    with patch.object(stage, "chain_page", drawn):
        result = stage.run(ReportSettings(experiment=config), stage_context("report", out, kept))
    assert result.outputs == ("report.html", "summary.md")
    html, summary = ((out / name).read_text() for name in result.outputs)
    stands_alone(html)
    whole = markdown(*pages)
    assert tables(summary) < tables(whole) and "took" not in summary
    return html, whole


@pytest.fixture(scope="module")
def written(chain, tmp_path_factory) -> tuple[str, str]:
    return report(chain, tmp_path_factory.mktemp("report") / "out")


def tables(markdown: str) -> set[str]:
    return {line for line in markdown.splitlines() if line.startswith("|")}


def copied(chain: Chain, root: Path, name: str, **fields: object) -> Path:
    """A copy of an input, as that of another node."""
    node = str(fields.get("node", name))
    shutil.copytree(chain[1][name], root / node)
    write_manifest(root / node, finished_manifest(chain[1][name]).model_copy(update=fields))
    return root / node


def test_text_from_a_model_is_never_markup(written):
    html, markdown = written
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;bold&lt;/b&gt;" in html
    assert "a &lt; b &amp; *c*" in html and "a < b" not in html
    block = next(block for block in markdown.split("````") if HOSTILE in block)
    assert block.startswith("\n11 rev +80")


def test_the_page_has_what_summaries_have_for_the_checkpoints_side_by_side_in_the_same_bytes_each_time(
    written, chain, tmp_path
):
    html, markdown = written
    finished = read_chain(*chain)
    row, greedy = (finished.evaluations[-1].row(("longer", decoding)) for decoding in ("sampled", "greedy"))
    assert row is not None and greedy is not None
    maj, k = f"{100 * row.maj_at_k[str(row.num_samples)]:.1f}", row.num_samples
    passed = ", ".join(f"{k}: {100 * share:.1f}" for k, share in row.pass_at_k.items())
    assert re.search(rf"\| longer \| RL \|.*\| {passed} \| {k}: {maj} \|", markdown)
    assert f"| longer | RL | {100 * row.truncated_share:.1f} | {100 * row.no_answer_share:.1f} |" in markdown
    cells = next(line for line in markdown.splitlines() if line.startswith("| 2 15 problems |")).split(" | ")
    assert len(cells) == 4 and cells[3].startswith(f"{100 * greedy.by_level['2'].accuracy:.1f} [")
    decodings = len(finished.decodings)
    for text, count in (("by subject", 4 * decodings), ("by level", decodings), ("pass@k</th>", decodings)):
        assert html.count(text) == count
    assert report(chain, tmp_path / "again") == written


def test_the_page_says_what_happened_to_every_suite_checkpoint_and_stage(written, chain):
    html, _ = written
    facts = [
        *("in_distribution", "longer", "other_mix", "retention", "base → SFT", "SFT → RL", "sampled"),
        *("2026-03-04 10:03 UTC", "2m21s", "from step 100", "torch", "2.13.0", "prompts_per_step: 4", "6m22s"),
        *(finished_manifest(directory).key for directory in chain[1].values()),
    ]
    for text in written:
        assert not [fact for fact in facts if fact not in text.replace("\u00a0", " ")]
    titles = re.findall(r"<figcaption><h4>([^<]*)</h4>", html)
    wanted = {"Reward", "Outcomes", "Entropy", "Response length", "Off-policy share", "Shaping weight", "Gradient norm"}
    assert wanted <= set(titles)
    assert (titles.count("Loss"), titles.count("Outcomes of grading")) == (3, 2)
    (drawn,) = stands_alone(html).figures["Held-out accuracy, longer"]
    assert drawn.count("<use") == 5  # steps 0, 10, 20, 30 and 40
    assert "40 logged steps" in html and "<span>reference 18</span>" in html


def test_a_difference_is_called_clear_only_after_holms_correction(written, chain):
    finished = read_chain(*chain)
    seen = set()
    for decoding in finished.decodings:
        rows = difference_table(finished, decoding).rows
        for column, (first, second) in enumerate(finished.transitions, start=1):
            comparison = second.against(first, finished.suites, decoding)
            adjusted = holm([row.paired.p_value for row in comparison.benchmarks])
            for row, p in zip(rows, adjusted, strict=True):
                assert (row[column].tone != "") == (p < 0.05)
                assert row[column].details[1] == ("p < 0.001" if p < 0.001 else f"p = {p:.3f}")
                seen.add(row[column].tone)
    assert seen == {"", "better"}
    assert "after Holm's correction over the suites" in written[1]


def test_a_chain_without_rl_or_sft_has_a_report_too_and_an_unfinished_input_has_none(chain, tmp_path):
    html, _ = report(chain, tmp_path / "out", "rl", "evaluate_rl", "sft", "evaluate_sft")
    assert "Sample rollouts" not in html and "Sample responses" in html
    shown = html.partition('id="samples"')[2].partition("</section>")[0]
    assert shown.count("<article") > 1 and shown.count("<span>reference ") == shown.count("<article")
    (tmp_path / "sft").mkdir()
    with pytest.raises(LuffyError, match="sft: not a finished stage"):
        report((chain[0], {**chain[1], "sft": tmp_path / "sft"}), tmp_path / "out")


def test_silent_checkpoints_and_runs_are_advised_on_and_few_metrics_break_nothing(chain, tmp_path):
    objective = load_experiment("exp_configs/smoke.yaml", ["method=on_policy"]).objective
    rl, evaluation = (copied(chain, tmp_path, name) for name in ("rl", "evaluate_base"))
    silent = {"batch/zero_advantage_share": 1.0, "actor/entropy_on_policy": 2.0, "actor/loss": None}
    (rl / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **silent}) + "\n" for step in (1, 2)))
    results = json.loads((evaluation / "results.json").read_text())
    row = results["rows"][0]
    row["outcomes"] = dict.fromkeys(row["outcomes"], 0) | {"no_answer": sum(row["outcomes"].values())}
    (evaluation / "results.json").write_text(json.dumps(results))
    config = chain[0].model_copy(update={"objective": objective})
    pages = report((config, {**chain[1], "rl": rl, "evaluate_base": evaluation}), tmp_path / "out")
    for advice in ("in 2 of 2 steps every advantage was 0", f"base, {row['suite']}: 100 % of the responses"):
        assert all(page.count(advice) == 1 for page in pages)


MEASURED = DifficultyConfig(num_samples=4, temperature=1.0, max_response_tokens=8, engine="transformers")
CHOSEN = difficulty_card("base", MEASURED, RATES, [fit_of(rate, MEASURED) for rate in RATES], ["sums"] * 4 + [""])
TEACHER = TeacherCard(
    model="org/big", decoding="temperature 1, top_p 1", max_response_tokens=64, prompts=12, questions=20,
    answers=18, correct=9, solved=7, outcomes={"correct": 9, "failed": 2, "wrong": 9},
    rejected={}, traces=6, with_logprobs=0, prompt_tokens=1000, num_tokens=2000, cost=1.25, not_asked=4,
)  # fmt: skip
TAUGHT = TaughtCard(
    prompts=12, asked_about=12, given=6, without=("p1",), never_asked=(), train_rows=12, sft_rows=6,
    max_tokens=None, max_cost=None, teachers={"big": TEACHER},
)  # fmt: skip
SHOWN = "12 | 20 | 18 | 50.0 | 7 | correct 9, failed 2, wrong 9 | – | 6 | 0 | 1,000 | 2,000 | 1.2500 | 4"


@pytest.mark.parametrize(("name", "settings", "card", "section", "words", "lines"), [
    ("difficulty", {"num_samples": 4}, CHOSEN, difficulty_section(CHOSEN), "Difficulty",
     [f"| base | {ASKED} | 0 to 0.9 | 4 of 5 | 0 of 5 | 1 of 5 |", "| sums | 4 | 4 | 37.5 |",
      "| (unnamed) | 1 | 0 | 100.0 |"]),
    ("sample", {"teachers": {"big": {"path": "org/big", "max_response_tokens": 64}}}, TAUGHT,
     taught_section(TAUGHT), "teachers wrote",
     [f"| big | org/big | temperature 1, top_p 1, at most 64 tokens | {SHOWN} |"]),
])  # fmt: skip
def test_which_prompts_rl_was_given_and_what_teachers_answered_is_shown_where_the_chain_has_it(
    chain, written, tmp_path, name, settings, card, section, words, lines
):
    folder = copied(chain, tmp_path, "base", node=name, stage=name, outputs=())
    (folder / "card.json").write_text(card_json(card))
    own = load_experiment({**chain[0].model_dump(mode="json"), name: settings})
    html, markdown = report((own, {**chain[1], name: folder}), tmp_path / "out")
    assert not [line for line in lines if line not in markdown]
    assert tables(card_markdown(section)) <= tables(markdown)
    assert words in html and not any(words in text for text in written)


def test_rounds_of_expert_iteration_have_their_numbers_and_what_they_sampled(chain, tmp_path):
    config = load_experiment("exp_configs/smoke.yaml", ["name=arithmetic", "chain=expert_iteration"])
    folders = {name: chain[1][name] for name in ("data", "base", "evaluate_base")}
    asked = SampleConfig(num_samples=4, max_response_tokens=8, engine="transformers")
    for number, trained in enumerate(("sft", "rl"), 1):
        kept = KeptCount(prompts=3 + number, traces=1234, mean_tokens=10.5, with_logprobs=7)
        card = sample_card("base" if number == 1 else "sft_1", number, asked, summarise_rates(RATES, 4), kept)
        origins = {"sample": "base", "sft": trained, "evaluate_sft": f"evaluate_{trained}"}
        for node, origin in origins.items():
            name = f"{node}_{number}"
            folders[name] = copied(chain, tmp_path, origin, node=name, stage=node.partition("_")[0])
        (folders[f"sample_{number}"] / "card.json").write_text(card_json(card))
        results = folders[f"evaluate_sft_{number}"] / "results.json"
        results.write_text(results.read_text().replace(f'"{trained}"', f'"sft_{number}"'))
    html, markdown = report((config, folders), tmp_path / "out")
    for number, name in ((1, "base"), (2, "SFT 1")):
        kept = f"first, at most 1 a prompt | {3 + number} of 5 | 1,234 | 7 | 10.5"
        assert f"| {number} | {name} | {ASKED} | {kept} |" in markdown
        assert f"| {number} | 1 | 1 | 1 | 1 | 1 |" in markdown
    assert "base → SFT 1 → SFT 2" in html and "Supervised fine-tuning 2" in html
    stages = re.findall(r"^\| (base|s\w+_\d) \|", markdown.partition("## Provenance")[2], re.MULTILINE)
    assert stages == ["base", "sample_1", "sft_1", "sample_2", "sft_2"]
