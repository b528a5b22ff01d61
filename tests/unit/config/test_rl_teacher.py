"""`rl.teacher` and what it is refused with."""

import pytest

from luffy.config import load_experiment
from luffy.config.strict import FOR_IDENTITY
from luffy.config.training import RLConfig
from luffy.errors import ConfigError

MODEL = "rl.teacher={kind: model, path: some/model}"
SERVED = "rl.teacher={kind: served, name: org/big}"
URL = "execution.rl_teacher.urls=[http://127.0.0.1:9]"
REFUSED = {
    "served nowhere": (["method=opd", SERVED], "execution.rl_teacher.urls: missing; say where org/big is served"),
    "served for nobody": (["method=opd", MODEL, URL], "execution.rl_teacher.urls has no effect without"),
    "served at a temperature": (["method=opd", SERVED, URL, "rl.temperature=0.7"], "scores at temperature 1, not at"),
    "missing": (["method=opd"], "rl.teacher: missing; a distillation term needs it"),
    "without a use": (["method=on_policy", MODEL], "rl.teacher has no effect"),
    "blind": (["method=opsd", 'rl.teacher.prompt="{problem}"'], "{trace} is missing"),
    "without traces": (["method=opsd", "data.rl=complement"], "complement has prompts without any"),
    "without rewards": (
        ["method=on_policy", "objective.advantage={kind: none}"],
        "advantage.kind: none leaves the surrogate 'on_policy' nothing to learn",
    ),
    "rewards for nobody": (
        ["method=opd", MODEL, "objective.advantage={kind: raw}"],
        "advantage.kind: raw has no effect: no term uses it; set kind: none",
    ),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_effect_or_no_teacher_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_experiment("smoke", ["chain=rl", *overrides])
    assert words in str(found.value)


def test_an_absent_teacher_leaves_itself_out_of_the_dump() -> None:
    rl = load_experiment("smoke", ["chain=rl", "method=on_policy"]).rl
    assert isinstance(rl, RLConfig)
    assert "teacher" not in rl.model_dump(mode="json") and "teacher" not in rl.model_dump(context=FOR_IDENTITY)
