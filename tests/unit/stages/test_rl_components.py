"""What the RL stage opens: the prompts that `data.rl` names, also in its settings and identity, and its parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic.answered_stage import stage_context
from synthetic.arithmetic import problems, tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.settings import CONFIGURE
from luffy.data.parquet import write_prompts
from luffy.data.templates import load_tokenizer
from luffy.errors import ConfigError, DataError
from luffy.pipeline.identity import identifying
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.stages.rl import run
from luffy.stages.rl_components import open_anchors
from luffy.types import Trace

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
APART = "chain=sft_then_rl_apart"
TRACE = "1 +1\n=2 -0\n=2\n\\boxed{2}"


def settings_of(stage: str, *overrides: str):
    return CONFIGURE[stage](load_experiment(SMOKE, ["rl.prompts_per_step=8", *overrides]))


def rl_on(folder: Path, complement: int, *overrides: str, num_traces: int = 0) -> None:
    """Start RL on 6 training prompts with so many traces and a complement of that many without."""
    traces = tuple(Trace(f"trace {number}", "teacher") for number in range(num_traces))
    write_prompts(folder / "train.parquet", [replace(problem, traces=traces) for problem in problems(6)])
    write_prompts(folder / "rl_complement.parquet", problems(complement))
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    context = stage_context("rl", folder, {"data": folder, "model": folder})
    run(settings_of("rl", *overrides), context)


@pytest.mark.parametrize(
    ("overrides", "complement", "line"),
    [
        (["chain=sft_then_rl"], 2, "only 6 training prompts are left"),
        ([APART], 2, "only 2 prompts of the complement are left"),
        ([APART], 0, r"data\.rl: the complement is empty, .* lower data\.sft\.unique_train_examples"),
    ],
)
def test_rl_reads_the_prompts_that_data_rl_names(tmp_path, overrides, complement, line):
    with pytest.raises(DataError, match=line):
        rl_on(tmp_path, complement, *overrides)


@pytest.mark.parametrize(("method", "setting"), [("luffy", "off_policy"), ("guide", "hint"), ("bread", "anchor")])
def test_a_method_with_traces_is_refused_where_no_prompt_has_one(tmp_path, method, setting):
    with pytest.raises(DataError, match=rf"objective\.group\.{setting} uses traces, and no training prompt has one"):
        rl_on(tmp_path, 0, "chain=rl", f"method={method}")


def test_a_choice_among_traces_is_refused_where_no_prompt_has_one(tmp_path):
    with pytest.raises(
        DataError, match=r"nothing to choose from: no training prompt has more traces than .*off_policy, 2"
    ):
        rl_on(tmp_path, 0, "chain=rl", "method=ampo", num_traces=2)


def test_the_prompts_are_part_of_rls_identity_and_of_no_other():
    for stage in ("prepare_data", "sft"):
        assert identifying(settings_of(stage, APART)) == identifying(settings_of(stage, "chain=sft_then_rl"))
    apart, together = (identifying(settings_of("rl", chain)) for chain in (APART, "chain=sft_then_rl"))
    assert apart == {**together, "prompts": "complement"} and together["prompts"] == "train"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["method=luffy"], "data.rl: complement has prompts without traces, from which the method learns"),
        (["method=relift"], "data.rl: complement has prompts without traces"),
        (["difficulty={}"], "data.rl: complement has prompts that the stage difficulty does not measure"),
    ],
)
def test_what_needs_traces_or_pass_rates_is_refused_at_load_time(overrides, line):
    with pytest.raises(ConfigError, match=line):
        load_experiment(SMOKE, [APART, *overrides])


def test_anchors_cut_a_trace_between_its_lines_also_where_the_template_opens_the_reasoning(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{{ '<think>\\n' }}"
    tokenizer.save_pretrained(tmp_path / "model")
    settings = settings_of("rl", "chain=rl", "method=bread")
    anchors = open_anchors(settings, load_tokenizer(tmp_path / "model"))
    assert anchors is not None
    ids = tuple(tokenizer(TRACE, add_special_tokens=False)["input_ids"])
    search = anchors.search(RolloutTask("a", (5,), "2", (Demonstration(TRACE, ids, None),)), 1)
    assert search is not None
    assert [tokenizer.decode(ids[:end]) for end in search._ends] == ["1 +1\n", "1 +1\n=2 -0\n", "1 +1\n=2 -0\n=2\n"]
