"""What the RL stage opens: the prompts that `data.rl` names, also in its settings and identity, and its parts."""

import json
from dataclasses import replace

import pytest
from support.refusals import refused
from support.stages import CONFIGS
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

APART = "chain=sft_then_rl_apart"
TRACE = "1 +1\n=2 -0\n=2\n\\boxed{2}"


def settings_of(stage: str, *overrides: str):
    return CONFIGURE[stage](load_experiment(CONFIGS / "smoke.yaml", ["rl.prompts_per_step=8", *overrides]))


@pytest.mark.parametrize(
    ("overrides", "traces", "complement", "named"),
    [
        (["chain=sft_then_rl"], 0, 2, ("6 training prompts",)),
        ([APART], 0, 2, ("2 prompts of the complement",)),
        ([APART], 0, 0, ("data.rl", "complement", "data.sft.unique_train_examples")),
        (["chain=rl", "method=luffy"], 0, 0, ("objective.group.off_policy", "no training prompt")),
        (["chain=rl", "method=guide"], 0, 0, ("objective.group.hint", "no training prompt")),
        (["chain=rl", "method=bread"], 0, 0, ("objective.group.anchor", "no training prompt")),
        (["chain=rl", "method=ampo"], 2, 0, ("no training prompt has more traces", "off_policy, 2")),
    ],
)
def test_prompts_that_a_method_cannot_use_are_refused(tmp_path, overrides, traces, complement, named):
    """Of 6 training prompts with so many traces each, and of a complement of that many without."""
    known = tuple(Trace(f"trace {number}", "teacher") for number in range(traces))
    write_prompts(tmp_path / "train.parquet", [replace(problem, traces=known) for problem in problems(6)])
    write_prompts(tmp_path / "rl_complement.parquet", problems(complement))
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    with refused(*named, error=DataError):
        run(settings_of("rl", *overrides), stage_context("rl", tmp_path, {"data": tmp_path, "model": tmp_path}))


@pytest.mark.parametrize(
    ("override", "named"), [("method=luffy", "traces"), ("method=relift", "traces"), ("difficulty={}", "difficulty")]
)
def test_what_needs_traces_or_pass_rates_is_refused_at_load_time(override, named):
    with refused("data.rl: complement", named, error=ConfigError):
        load_experiment(CONFIGS / "smoke.yaml", [APART, override])


def test_the_prompts_are_part_of_rls_identity_and_of_no_other():
    for stage in ("prepare_data", "sft"):
        assert identifying(settings_of(stage, APART)) == identifying(settings_of(stage, "chain=sft_then_rl"))
    apart, together = (identifying(settings_of("rl", chain)) for chain in (APART, "chain=sft_then_rl"))
    assert apart == {**together, "prompts": "complement"} and together["prompts"] == "train"


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
