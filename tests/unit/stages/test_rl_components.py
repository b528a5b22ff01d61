"""What the RL stage makes its parts of."""

from pathlib import Path

from synthetic.arithmetic import tiny_tokenizer

from luffy.config import load_experiment
from luffy.config.settings import CONFIGURE
from luffy.data.templates import load_tokenizer
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.stages.rl_components import open_anchors

SMOKE = Path(__file__).parents[3] / "exp_configs" / "smoke.yaml"
TRACE = "1 +1\n=2 -0\n=2\n\\boxed{2}"


def test_anchors_cut_a_trace_between_its_lines_also_where_the_template_opens_the_reasoning(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{{ '<think>\\n' }}"
    tokenizer.save_pretrained(tmp_path / "model")
    settings = CONFIGURE["rl"](load_experiment(SMOKE, ["chain=rl", "method=bread"]))
    anchors = open_anchors(settings, load_tokenizer(tmp_path / "model"))
    assert anchors is not None
    ids = tuple(tokenizer(TRACE, add_special_tokens=False)["input_ids"])
    search = anchors.search(RolloutTask("a", (5,), "2", (Demonstration(TRACE, ids, None),)), 1)
    assert search is not None
    assert [tokenizer.decode(ids[:end]) for end in search._ends] == ["1 +1\n", "1 +1\n=2 -0\n", "1 +1\n=2 -0\n=2\n"]
