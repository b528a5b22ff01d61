"""The stage `report`: one file that stands alone, says what happened, and trusts no text from a model."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic.answered_stage import stage_context
from synthetic.finished_chain import HOSTILE, write_chain

from luffy.config import ExperimentConfig, load_experiment
from luffy.config.answers import DifficultyConfig, SampleConfig
from luffy.config.settings import ReportSettings
from luffy.data.pass_rates import KeptCount, PassRate, card_json, difficulty_card, fit_of, sample_card, summarise_rates
from luffy.data.synthesis_card import SynthesisCard, TeacherCard
from luffy.errors import LuffyError
from luffy.pipeline.manifest import finished_manifest, write_manifest
from luffy.report.cards import card_markdown, difficulty_section, synthesis_section
from luffy.report.chain_page import chain_page, difference_table, read_chain
from luffy.report.page import html
from luffy.stages.report import run
from luffy.statistics.paired import holm

Chain = tuple[ExperimentConfig, dict[str, Path]]
VOID = {"meta", "link", "br", "img", "hr", "input"}


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Chain:
    return write_chain(tmp_path_factory.mktemp("chain"), num_problems=30, num_steps=40)


def report(chain: Chain, out: Path, *without: str) -> tuple[str, str]:
    config, inputs = chain
    kept = {name: path for name, path in inputs.items() if name not in without}
    assert run(ReportSettings(experiment=config), stage_context("report", out, kept)).outputs == (
        "report.html",
        "report.md",
    )
    return (out / "report.html").read_text(), (out / "report.md").read_text()


@pytest.fixture(scope="module")
def written(chain, tmp_path_factory) -> tuple[str, str]:
    return report(chain, tmp_path_factory.mktemp("report") / "out")


class Tags(HTMLParser):
    """Checks that tags nest, and collects them."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags


def references(tags: Tags) -> Iterator[str]:
    for _, attributes in tags.seen:
        yield from (attributes.get(name) or "" for name in ("href", "src", "xlink:href") if name in attributes)


def test_the_page_is_well_formed_and_needs_nothing_else(written):
    tags = parsed(written[0])
    assert all(reference.startswith("#") for reference in references(tags))
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in tags.seen}
    assert "@import" not in written[0]
    assert re.findall(r"url\((?!#)", written[0]) == []


def test_no_two_elements_share_an_id_and_every_link_has_its_target(written):
    tags = parsed(written[0])
    ids = [attributes["id"] for _, attributes in tags.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {reference[1:] for reference in references(tags)} | set(re.findall(r"url\(#([^)]*)\)", written[0]))
    assert targets <= set(ids)


def test_text_from_a_model_is_never_markup(written):
    html, markdown = written
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;bold&lt;/b&gt;" in html
    block = next(block for block in markdown.split("````") if HOSTILE in block)
    assert block.startswith("\n11 rev +80")


def test_the_page_has_what_summaries_have_for_the_checkpoints_side_by_side(written, chain):
    html, markdown = written
    finished = read_chain(*chain)
    row = finished.evaluations[-1].row(("longer", "sampled"))
    assert row is not None and row.agreement is not None
    maj, k = f"{100 * row.maj_at_k[str(row.num_samples)]:.1f}", row.num_samples
    passed = ", ".join(f"{k}: {100 * share:.1f}" for k, share in row.pass_at_k.items())
    assert re.search(rf"\| longer \| RL \|.*\| {passed} \| {k}: {maj} \|", markdown)
    assert f"| longer | RL | math, math_strict | {100 * row.agreement.share:.1f} |" in markdown
    shares = f"{100 * row.truncated_share:.1f} | {100 * row.no_answer_share:.1f}"
    assert f"| longer | RL | {shares} |" in markdown
    level = row.by_level["2"]
    cells = next(line for line in markdown.splitlines() if line.startswith("| 2 15 problems |")).split(" | ")
    assert len(cells) == 4
    greedy = finished.evaluations[-1].row(("longer", "greedy"))
    assert greedy is not None and cells[3].startswith(f"{100 * greedy.by_level['2'].accuracy:.1f} [")
    assert level.num_problems == 15
    decodings = len(finished.decodings)
    for text, count in (("by subject", 4 * decodings), ("by level", decodings), ("pass@k</th>", decodings)):
        assert html.count(text) == count
    assert "a &lt; b &amp; *c*" in html
    assert "a < b" not in html


def test_checkpoints_of_other_stages_are_shown_in_colors_of_their_own(chain):
    finished = read_chain(*chain)
    base, sft, rl = finished.evaluations
    other = replace(sft, results=sft.results.model_copy(update={"checkpoint": "merge"}))
    metrics = {name if name != "sft" else "merge": rows for name, rows in finished.metrics.items()}
    page = chain_page(replace(finished, evaluations=(base, other, rl), metrics=metrics))
    opening, results, *training = page.sections
    assert [(tile.color, tile.label) for tile in opening.tiles] == [("c6", "base"), ("c3", "merge"), ("c1", "RL")]
    assert results.sections[0].figures[0].legend == (("c6", "base"), ("c3", "merge"), ("c1", "RL"))
    assert [section.title for section in training[:3]] == ["Reinforcement learning", "merge", "Base policy"]
    assert "merge" in html(page)


def test_the_summary_says_the_headline_numbers_in_words(written, chain):
    for text in written:
        text = text.replace("\u00a0", " ")
        assert "Accuracy on in_distribution (30 problems, greedy decoding, 95 % intervals): base " in text
        assert re.search(r"RL minus SFT on the same problems: \+\d+\.\d \[", text)
        assert "Over 40 RL steps (luffy) the mean reward of rollouts went from" in text
        assert "The 7 stages took 6m22s in all." in text


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
    assert "after Holm's correction over 4 suites" in written[1]


def test_every_suite_checkpoint_and_decoding_is_shown(written):
    for text in written:
        for name in ("in_distribution", "longer", "other_mix", "retention", "base → SFT", "SFT → RL", "sampled"):
            assert name in text


def test_curves_of_all_stages_are_drawn(written):
    titles = re.findall(r"<figcaption><h4>([^<]*)</h4>", written[0])
    wanted = {"Reward", "Outcomes", "Entropy", "Response length", "Off-policy share", "Shaping weight", "Gradient norm"}
    assert wanted <= set(titles)
    assert titles.count("Loss") == 3
    assert titles.count("Outcomes of grading") == 2


def test_keys_versions_times_and_configuration_are_there(written, chain):
    for directory in chain[1].values():
        manifest = finished_manifest(directory)
        assert all(manifest.key in text for text in written)
    for text in written:
        for fact in ("2026-03-04 10:03 UTC", "2m21s", "from step 100", "torch", "2.13.0", "prompts_per_step: 4"):
            assert fact in text


def test_a_page_reads_from_what_came_out_to_its_tables(written):
    html, markdown = written
    parts = ("Results", "Reinforcement learning", "Sample rollouts", "Tables", "Provenance")
    places = [markdown.index(part) for part in ("Accuracy on ", *(f"\n## {title}" for title in parts))]
    assert places == sorted(places)
    folded = html.partition('id="tables"')[2].partition("</section>")[0]
    assert "<details><summary>Every number of greedy decoding" in folded
    assert "<span>reference 18</span>" in html


def test_the_same_inputs_give_the_same_bytes(written, chain, tmp_path):
    assert report(chain, tmp_path / "again") == written


def test_a_chain_without_rl_or_sft_has_a_report_too(chain, tmp_path):
    html, markdown = report(chain, tmp_path / "out", "rl", "evaluate_rl", "sft", "evaluate_sft")
    parsed(html)
    assert "Sample rollouts" not in html and "Sample responses" in html
    shown = html.partition('id="samples"')[2].partition("</section>")[0]
    assert shown.count("<article") > 1 and shown.count("<span>reference ") == shown.count("<article")
    assert "The 3 stages took" in markdown


def test_a_constant_or_missing_metric_does_not_break_the_page(chain, tmp_path):
    rl = tmp_path / "rl"
    shutil.copytree(chain[1]["rl"], rl)
    (rl / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.0, "actor/loss": null}\n')
    html, _ = report((chain[0], {**chain[1], "rl": rl}), tmp_path / "out")
    assert "1 logged step<" in html


def test_a_checkpoint_without_readable_answers_is_advised_on(chain, tmp_path):
    silent = tmp_path / "evaluate_base"
    shutil.copytree(chain[1]["evaluate_base"], silent)
    results = json.loads((silent / "results.json").read_text())
    row = results["rows"][0]
    row["outcomes"] = dict.fromkeys(row["outcomes"], 0) | {"no_answer": sum(row["outcomes"].values())}
    (silent / "results.json").write_text(json.dumps(results))
    pages = report((chain[0], {**chain[1], "evaluate_base": silent}), tmp_path / "out")
    advice = f"base, {row['suite']}: 100 % of the responses have no answer that the grader can read; does the prompt"
    assert all(page.count(advice) == 1 for page in pages)


def test_a_run_that_was_never_rewarded_is_advised_on(chain, tmp_path):
    objective = load_experiment("exp_configs/smoke.yaml", ["method=on_policy"]).objective
    rl, config = tmp_path / "rl", chain[0].model_copy(update={"objective": objective})
    shutil.copytree(chain[1]["rl"], rl)
    silent = {"batch/zero_advantage_share": 1.0, "actor/entropy_on_policy": 2.0}
    lines = [json.dumps({"step": step, **silent}) for step in (1, 2)]
    (rl / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    pages = report((config, {**chain[1], "rl": rl}), tmp_path / "out")
    assert all(page.count("in 2 of 2 steps every advantage was 0, so rewards taught") == 1 for page in pages)


def test_an_unfinished_input_is_named(chain, tmp_path):
    unfinished = tmp_path / "sft"
    unfinished.mkdir()
    with pytest.raises(LuffyError, match="sft: not a finished stage"):
        report((chain[0], {**chain[1], "sft": unfinished}), tmp_path / "out")


def tables(markdown):
    return [line for line in markdown.splitlines() if line.startswith("|")]


def test_which_prompts_rl_was_given_is_shown_where_the_chain_has_chosen_them(chain, written, tmp_path):
    config, inputs = chain
    asked = DifficultyConfig(num_samples=4, temperature=1.0, max_response_tokens=8, engine="transformers")
    rates = [PassRate(f"p{i}", {"correct": i, "wrong": 4 - i}, num_tokens=20, num_truncated=i) for i in range(5)]
    card = difficulty_card(asked, rates, [fit_of(rate, asked) for rate in rates], ["sums"] * 4 + [""])
    measured = tmp_path / "difficulty"
    measured.mkdir()
    (measured / "card.json").write_text(card_json(card))
    manifest = finished_manifest(inputs["base"])
    renamed = {"node": "difficulty", "stage": "difficulty", "outputs": ()}
    write_manifest(measured, manifest.model_copy(update=renamed))
    choosing = ExperimentConfig.model_validate({**config.model_dump(), "difficulty": {"num_samples": 4}})
    html, markdown = report((choosing, {**inputs, "difficulty": measured}), tmp_path / "out")
    asked = "base | 4 a prompt, temperature 1, at most 8 tokens | 50.0 | 80.0 | 5.0 | 50.0 | correct 10, wrong 10"
    assert f"| {asked} | 0 to 0.9 | 4 of 5 | 0 of 5 | 1 of 5 |" in markdown
    assert "| correct of 4 | 0 | 1 | 2 | 3 | 4 |" in markdown
    assert "| prompts | 1 | 1 | 1 | 1 | 1 |" in markdown
    assert "| sums | 4 | 4 | 37.5 |" in markdown and "| (unnamed) | 1 | 0 | 100.0 |" in markdown
    assert {*tables(card_markdown(difficulty_section(card)))} <= {*tables(markdown)}
    assert "Difficulty" in html and "4 of 5" in html
    stages = re.findall(r"^\| (base|difficulty|sft) \|", markdown.partition("## Provenance")[2], re.MULTILINE)
    assert stages == ["base", "difficulty", "sft"]
    assert not any("Difficulty" in text for text in written)


def test_held_out_accuracy_is_drawn_from_before_training_on(chain, written):
    html, _ = written
    assert "Held-out accuracy, longer" in html
    drawn = html[html.index('aria-label="rl-held-out-longer"') :]
    assert drawn[: drawn.index("</svg>")].count("<use") == 5  # steps 0, 10, 20, 30 and 40
    assert "40 logged steps" in html


def test_what_teachers_answered_is_in_the_report(chain, written, tmp_path):
    config, inputs = chain
    teacher = TeacherCard(
        model="org/big", decoding="temperature 1, top_p 1", max_response_tokens=64, prompts=12, questions=20,
        answers=18, correct=9, solved=7, outcomes={"correct": 9, "failed": 2, "wrong": 9},
        rejected={}, traces=6, with_logprobs=0, prompt_tokens=1000, num_tokens=2000, cost=1.25, not_asked=4,
    )  # fmt: skip
    card = SynthesisCard(
        prompts=12, asked_about=12, given=6, without=("p1",), never_asked=(), train_rows=12, sft_rows=6,
        max_tokens=None, max_cost=None, teachers={"big": teacher},
    )  # fmt: skip
    taught = tmp_path / "synthesize"
    taught.mkdir()
    (taught / "card.json").write_text(card_json(card))
    manifest = finished_manifest(inputs["base"])
    write_manifest(taught, manifest.model_copy(update={"node": "synthesize", "stage": "synthesize", "outputs": ()}))
    section = {"teachers": {"big": {"path": "org/big", "max_response_tokens": 64}}}
    teaching = ExperimentConfig.model_validate({**config.model_dump(), "synthesize": section})
    html, markdown = report((teaching, {**inputs, "synthesize": taught}), tmp_path / "out")
    decoding, outcomes = "temperature 1, top_p 1, at most 64 tokens", "correct 9, failed 2, wrong 9"
    counts = f"12 | 20 | 18 | 50.0 | 7 | {outcomes} | – | 6 | 0 | 1,000 | 2,000 | 1.2500 | 4"
    assert f"| big | org/big | {decoding} | {counts} |" in markdown
    assert {*tables(card_markdown(synthesis_section(card)))} <= {*tables(markdown)}
    assert "traces that teachers wrote" in html
    assert not any("teachers wrote" in text for text in written)


def test_rounds_of_expert_iteration_have_their_numbers_and_what_they_sampled(chain, tmp_path):
    _, inputs = chain
    config = load_experiment("exp_configs/smoke.yaml", ["name=arithmetic", "chain=expert_iteration"])
    rates = [PassRate(f"p{i}", {"correct": i, "wrong": 4 - i}, num_tokens=20, num_truncated=i) for i in range(5)]
    folders = {name: inputs[name] for name in ("data", "base", "evaluate_base")}
    for number, trained in enumerate(("sft", "rl"), 1):
        kept = KeptCount(prompts=3 + number, traces=1234, mean_tokens=10.5, with_logprobs=7)
        asked = SampleConfig(num_samples=4, max_response_tokens=8, engine="transformers")
        card = sample_card("base" if number == 1 else "sft_1", number, asked, summarise_rates(rates, 4), kept)
        for node, source in (
            (f"sample_{number}", None),
            (f"sft_{number}", trained),
            (f"evaluate_sft_{number}", trained),
        ):
            folders[node] = tmp_path / node
            origin = inputs[f"evaluate_{trained}" if "evaluate" in node else source or "base"]
            shutil.copytree(origin, folders[node])
            manifest = finished_manifest(origin).model_copy(update={"node": node, "stage": node.partition("_")[0]})
            write_manifest(folders[node], manifest)
        (folders[f"sample_{number}"] / "card.json").write_text(card_json(card))
        results = folders[f"evaluate_sft_{number}"] / "results.json"
        results.write_text(results.read_text().replace(f'"{trained}"', f'"sft_{number}"'))
    html, markdown = report((config, folders), tmp_path / "out")
    asked = "4 a prompt, temperature 1, at most 8 tokens | 50.0 | 80.0 | 5.0 | 50.0 | correct 10, wrong 10"
    for number, name in ((1, "base"), (2, "SFT 1")):
        kept = f"first, at most 1 a prompt | {3 + number} of 5 | 1,234 | 7 | 10.5"
        assert f"| {number} | {name} | {asked} | {kept} |" in markdown
        assert f"| {number} | 1 | 1 | 1 | 1 | 1 |" in markdown
    assert "base → SFT 1 → SFT 2" in html and "Supervised fine-tuning 2" in html
    stages = re.findall(r"^\| (base|s\w+_\d) \|", markdown.partition("## Provenance")[2], re.MULTILINE)
    assert stages == ["base", "sample_1", "sft_1", "sample_2", "sft_2"]
