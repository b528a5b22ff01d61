"""`rl.reference` and what it is refused with."""

import pytest

from luffy.config import load_experiment
from luffy.config.strict import FOR_IDENTITY
from luffy.config.training import RLConfig
from luffy.errors import ConfigError

EVERY_TWO = "rl.reference={refresh_every: 2}"
REFUSED = {
    "no kl term": (["method=on_policy", EVERY_TWO], "rl.reference has no effect: objective.terms has none"),
    "too late": (["method=uft", "rl.steps=3", "rl.reference={refresh_every: 3}"], "refresh_every 3 has no effect in 3"),
    "adapter": (["method=uft", EVERY_TWO, "model.lora={rank: 2, alpha: 4}"], "rl.reference: with model.lora"),
    "old policy": (["method=uft", "rl.reference={refresh_every: 1}"], "the policy before each RL step"),
    "no share": (["method=uft", "rl.reference={refresh_every: 2, mixup: 0}"], "mixup"),
}


@pytest.mark.parametrize(("overrides", "words"), REFUSED.values(), ids=REFUSED)
def test_a_reference_that_cannot_follow_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_experiment("smoke", ["chain=rl", "rl.steps=4", *overrides])
    assert words in str(found.value)


def test_a_reference_that_stays_leaves_itself_out_of_the_dump() -> None:
    rl = load_experiment("smoke", ["chain=rl", "method=uft"]).rl
    assert isinstance(rl, RLConfig)
    assert "reference" not in rl.model_dump(mode="json") and "reference" not in rl.model_dump(context=FOR_IDENTITY)


def test_a_reference_that_follows_is_part_of_the_identity() -> None:
    rl = load_experiment("smoke", ["chain=rl", "method=uft", "rl.steps=4", EVERY_TWO]).rl
    assert isinstance(rl, RLConfig)
    assert rl.model_dump(context=FOR_IDENTITY)["reference"] == {"refresh_every": 2, "mixup": 1.0}
