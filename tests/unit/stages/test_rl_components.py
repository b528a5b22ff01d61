"""What the RL stage opens: the prompts that `data.rl` names, also in its settings and identity, and its parts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.refusals import refused
from support.stages import CONFIGS
from synthetic.answered_stage import stage_context
from synthetic.arithmetic import problems, tiny_tokenizer
from tokenizers import Tokenizer

from luffy.config import load_experiment
from luffy.config.settings import settings_in
from luffy.data.parquet import write_prompts
from luffy.data.tokenizer import build_tokenizer
from luffy.errors import ConfigError, DataError
from luffy.pipeline.identity import identifying
from luffy.rl.group_starts import open_starts
from luffy.rl.rows import Demonstration, RolloutTask, Visit
from luffy.stages import rl_components
from luffy.stages.rl import run
from luffy.types import Trace

APART = "chain=sft_then_rl_apart"
TRACE = "1 +1\n=2 -0\n=2\n\\boxed{2}"


def settings_of(stage: str, *overrides: str):
    return settings_in(load_experiment(CONFIGS / "smoke.yaml", ["rl.prompts_per_step=8", *overrides]), stage)


def tiny_inputs(folder, tokenizer, traces=(), complement=0):
    known = tuple(Trace(text, "teacher") for text in traces)
    write_prompts(folder / "train.parquet", [replace(problem, traces=known) for problem in problems(6)])
    write_prompts(folder / "rl_complement.parquet", problems(complement))
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 128}))
    return {"data": folder, "model": folder}


@pytest.mark.parametrize(
    ("overrides", "traces", "complement", "named"),
    [
        (["chain=sft_then_rl"], 0, 2, ("6 training prompts",)),
        ([APART], 0, 2, ("2 prompts of the complement",)),
        ([APART], 0, 0, ("data.rl", "complement", "data.sft.unique_train_examples")),
        (["chain=rl", "method=luffy"], 0, 0, ("objective.group.starts.trace", "no training prompt")),
        (["chain=rl", "method=guide"], 0, 0, ("objective.group.starts.hint", "no training prompt")),
        (["chain=rl", "method=bread"], 0, 0, ("objective.group.starts.anchor", "no training prompt")),
        (["chain=rl", "method=ampo"], 2, 0,
         ("starts.trace.show.choose", "no training prompt has more traces", "rows, 2")),
    ],
)  # fmt: skip
def test_prompts_that_a_method_cannot_use_are_refused(tmp_path, overrides, traces, complement, named):
    """Of 6 training prompts with so many traces each, and of a complement of that many without."""
    inputs = tiny_inputs(tmp_path, tiny_tokenizer(), [f"trace {number}" for number in range(traces)], complement)
    with refused(*named, error=DataError):
        run(settings_of("rl", *overrides), stage_context("rl", tmp_path, inputs))


def test_a_teacher_whose_merges_have_another_order_is_refused_by_the_first_of_them(tmp_path, monkeypatch):
    policy, teacher = (build_tokenizer(["add 34 to and"] * 4) for _ in range(2))
    inputs = tiny_inputs(tmp_path, policy)
    state = json.loads(teacher.backend_tokenizer.to_str())
    merges = state["model"]["merges"]
    merges[1], merges[2] = merges[2], merges[1]
    teacher._tokenizer = Tokenizer.from_str(json.dumps(state))
    teacher.save_pretrained(tmp_path / "teacher")
    monkeypatch.setattr(rl_components, "model_folder", lambda path, setting: Path(path))  # it has no weights
    asked = f"rl.teachers={{big: {{kind: model, path: {tmp_path}/teacher}}}}"
    named = f"(model.merges.1 is {merges[1]}, the policy's {merges[2]})"
    with refused("rl.teachers.big.path", named, "sample.teachers", error=DataError):
        run(settings_of("rl", "rl.prompts_per_step=4", "method=opd", asked), stage_context("rl", tmp_path, inputs))


def test_the_prompts_are_part_of_rls_identity_and_of_no_other_and_what_needs_traces_or_rates_is_refused_at_load_time():
    for stage in ("prepare_data", "sft"):
        assert identifying(settings_of(stage, APART)) == identifying(settings_of(stage, "chain=sft_then_rl"))
    apart, together = (identifying(settings_of("rl", chain)) for chain in (APART, "chain=sft_then_rl"))
    assert apart == {**together, "prompts": "complement"} and together["prompts"] == "train"
    for override, named in {"method=luffy": "traces", "method=relift": "traces", "difficulty={}": "difficulty"}.items():
        with refused("data.rl: complement", named, error=ConfigError):
            load_experiment(CONFIGS / "smoke.yaml", [APART, override])


def test_a_search_cuts_a_trace_between_its_lines_also_where_the_template_opens_the_reasoning(tmp_path, monkeypatch):
    class OpenedError(Exception):
        """Ends the stage before it loads a model; has the starts that it has opened."""

    def opened(*arguments):
        raise OpenedError(open_starts(*arguments))

    monkeypatch.setattr(rl_components, "open_starts", opened)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{{ '<think>\\n' }}"
    inputs = tiny_inputs(tmp_path, tokenizer, traces=(TRACE,))
    own = settings_of("rl", "chain=rl", "method=bread", "rl.prompts_per_step=4")
    with pytest.raises(OpenedError) as caught:
        run(own, stage_context("rl", tmp_path, inputs))
    ((start,),) = caught.value.args
    ids = tuple(tokenizer(TRACE, add_special_tokens=False)["input_ids"])
    (slot,) = start.slots(Visit(RolloutTask("a", (5,), "2", (Demonstration(TRACE, ids, None),)), 1, 0), 1)
    assert [tokenizer.decode(ids[:end]) for end in slot.ends] == ["1 +1\n", "1 +1\n=2 -0\n", "1 +1\n=2 -0\n=2\n"]
