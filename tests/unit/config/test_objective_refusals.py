"""Every combination of objective options that contradicts itself, or would have no effect, is refused in one line."""

from pathlib import Path

import pytest
from synthetic.settings import SMOKE, rl_settings

from luffy.config import load_experiment
from luffy.errors import ConfigError

ON = "{name: rollouts, select: on_policy, loss: {kind: surrogate}, normaliser: {mode: token, population: joint}}"
OFF = """{name: traces, select: off_policy, loss: {kind: shaped_surrogate, shaping: {kind: rational}},
     normaliser: {mode: token, population: joint}}"""
SFT = "{name: sft, select: off_policy, loss: {kind: nll}, normaliser: {mode: token, population: own}}"
ENTROPY = "{name: entropy, select: response, loss: {kind: entropy}, normaliser: {mode: token, population: own}}"
MEAN = "{kind: group_mean, population: joint, scale_by_std: false}"
ROLLOUTS_ONLY = "{kind: group_mean, population: on_policy, scale_by_std: false}"
PLAIN = "{size: 4, off_policy: 0}"
MIXED = "{size: 4, off_policy: 1}"
UNIFORM = "{kind: uniform, low: 0.0, high: 1.0}"


def objective(group: str = PLAIN, advantage: str = MEAN, terms: tuple[str, ...] = (ON,), more: str = "") -> str:
    listed = "\n".join(f"    - {term}" for term in terms)
    return f"objective:\n  group: {group}\n  advantage: {advantage}\n  terms:\n{listed}\n{more}"


def mixed(*terms: str, advantage: str = MEAN, more: str = "") -> str:
    return objective(MIXED, advantage, terms, more)


def term(
    loss: str = "{kind: surrogate}",
    select: str = "on_policy",
    normaliser: str = "mode: token, population: joint",
    **more: str,
) -> str:
    added = "".join(f", {key}: {value}" for key, value in more.items())
    return f"{{name: extra, select: {select}, loss: {loss}, normaliser: {{{normaliser}}}{added}}}"


def only(*of_term: str, **more: str) -> str:
    return objective(terms=(term(*of_term, **more),))


def mean(more: str) -> str:
    return MEAN.replace("}", f", {more}}}")


def prefix(length: str, off_policy: int = 1) -> str:
    return f"{{size: 4, off_policy: {off_policy}, prefix: {{length: {length}}}}}"


def interleaved(*terms: str) -> str:
    listed = "\n".join(f"      - {term}" for term in terms)
    return objective(more=f"  interleaved_sft:\n    buffer_size: 2\n    terms:\n{listed}\n")


OWN = "mode: token, population: own"
BEFORE_GATE = "mode: token, population: joint, before_gate: true"
REPLACING = "{size: 4, off_policy: 1, off_policy_when_accuracy_at_most: 0.25}"
SHAPED = "{kind: shaped_surrogate, shaping: {kind: rational}}"
COSINE = "{kind: warmup_cosine, start: 0.0, peak: 1.0, end: 0.5, warmup: 0.6, decay: 0.6}"
CORRECTION = "{kind: truncate}"
CRITIC = "\nrl: {critic: {optimizer: {lr: 1e-5}}}\n"

# fmt: off
SCHEDULES_AND_LOSSES = [
    ("dual_clip 1.1 must be above 1 + clip_high 1.2", only("{kind: clipped_surrogate, dual_clip: 1.1}")),
    ("min_weight 1.0 must be below max_weight 0.5",
     mixed(term("{kind: shaped_surrogate, shaping: {kind: log}, min_weight: 1.0, max_weight: 0.5}", "off_policy"))),
    ("warmup 0.6 and decay 0.6 are together more than the whole stage", only(coefficient=COSINE)),
    ("start 1.0 must lie between minimum 1e-06 and maximum 0.1",
     objective(terms=(ON, term("{kind: entropy}", normaliser=OWN,
                           coefficient="{kind: adaptive, start: 1, target: 1}")))),
    ("a schedule from 0.5 to 0.5 stays where it is; give just the number",
     only(coefficient="{kind: cosine, start: 0.5, end: 0.5}")),
    ("f lies between 0 and 1: with these clamps no token has a gradient",
     mixed(term("{kind: shaped_surrogate, shaping: {kind: rational}, max_weight: -1.0}", "off_policy"))),
    ("a schedule that is 1.0 throughout stays where it is",
     only(coefficient="{kind: warmup_cosine, start: 1, peak: 1, end: 1, warmup: 0.1, decay: 0.5}")),
    ("coefficient 0 has no effect; remove the term", only(coefficient="0.0")),
    ("an adaptive coefficient is for the entropy loss", only(coefficient="{kind: adaptive, start: 0.01, target: 1}")),
]
HINT = "{size: 4, off_policy: 0, hint: {levels: [0.5], keep: first_correct, learn: LEARN}}"
BARE, HINTED = (HINT.replace("LEARN", learn) for learn in ("bare", "hinted"))
IN_GROUPS = HINTED.replace("first_correct", "all").replace("}}", ", groups: {}}}")
HINTS = [
    ("levels [0.5, 0.5] must rise", objective(BARE.replace("[0.5]", "[0.5, 0.5]"), terms=(ON, OFF))),
    ("group.hint.levels.0", objective(BARE.replace("[0.5]", "[1.0]"), terms=(ON, OFF))),
    ("template must have {hint} once", objective(HINTED.replace("}}", ", template: '{prompt}'}}"))),
    ("hint samples rows of other prompts, off_policy makes rows of traces; set off_policy: 0",
     objective(HINTED.replace("off_policy: 0", "off_policy: 1"))),
    ("hint: 5 rows are above size 4; sample fewer, or set keep: first_correct",
     objective(HINTED.replace("first_correct", "all, rows_per_level: 5"))),
    ("a group may have fewer wrong rollouts than the 3 rows that replace them",
     objective(HINTED.replace("first_correct", "all, rows_per_level: 3, accuracy_at_most: 0.5"))),
    # 29 of 100 are at most 0.29, though 0.29 * 100 is 28.999999999999996
    ("a group may have fewer wrong rollouts than the 72 rows that replace them",
     objective(HINTED.replace("size: 4", "size: 100")
               .replace("first_correct", "all, rows_per_level: 72, accuracy_at_most: 0.29"))),
    ("group.hint with learn: bare has no effect: no term learns from off_policy tokens", objective(BARE)),
    ("set behavior: recorded, so that the ratio is to the policy with the hint", objective(BARE, terms=(ON, OFF))),
    ("term 'extra': clipped_surrogate takes hinted rows for samples of the bare prompt",
     objective(BARE, terms=(term("{kind: clipped_surrogate}", "response"),))),
    ("term 'extra': multiple_importance takes hinted rows for samples of the bare prompt",
     objective(BARE, terms=(ON, term("{kind: multiple_importance}", "off_policy")))),
    ("groups are learned as they are sampled; set keep: all", objective(HINTED.replace("}}", ", groups: {}}}"))),
    ("after has no effect with groups", objective(IN_GROUPS.replace("all", "all, after: 0.1"))),
    ("groups.level runs from 2 to 2; there are levels 1 to 1", objective(IN_GROUPS.replace("{}", "{level: 2}"))),
    ("fewer_above 0.4 must not be below more_below 0.5",
     objective(IN_GROUPS.replace("{}", "{level: {kind: by_history, more_below: 0.5, fewer_above: 0.4}}"))),
    ("selects off_policy tokens but group.off_policy is 0", objective(HINTED, terms=(ON, OFF))),
    ("replay and group.hint cannot be combined", objective(BARE, terms=(ON, SFT), more="  replay: {}\n")),
]
GROUPS = [
    ("off_policy 4 must be below size 4: RL needs rollouts", objective("{size: 4, off_policy: 4}")),
    ("off_policy 5 must not be above size 4", objective(prefix(UNIFORM, 5))),
    ("prefix has no effect with off_policy: 0", objective(prefix(UNIFORM, 0))),
    ("low runs from -0.1 to -0.1; it is a share of the trace",
     objective(prefix("{kind: uniform, low: -0.1, high: 1}"))),
    ("high runs from 0 to 2; it is a share of the trace",
     objective(prefix("{kind: uniform, low: 0.0, high: {kind: linear, start: 0.0, end: 2.0}}"))),
    ("probability runs from 1.5 to 1.5", objective(prefix("{kind: binomial, probability: 1.5}"))),
    ("low 0.5 must be below high 0.5", objective(prefix("{kind: evenly_spaced, low: 0.5, high: 0.5}"))),
    ("shared contradicts length.kind: evenly_spaced",
     objective("{size: 4, off_policy: 1, prefix: {shared: true, length: {kind: evenly_spaced}}}")),
    ("off_policy_when_accuracy_at_most has no effect with off_policy: 0",
     objective("{size: 4, off_policy: 0, off_policy_when_accuracy_at_most: 0.0}")),
    ("off_policy_when_accuracy_at_most adds whole traces after the rollouts",
     objective(f"{{size: 4, off_policy: 1, off_policy_when_accuracy_at_most: 0.0, prefix: {{length: {UNIFORM}}}}}")),
    ("choose: likeliest_answer is among traces that replace failed rollouts; set off_policy_when_accuracy_at_most",
     objective("{size: 4, off_policy: 1, choose: likeliest_answer}")),
    ("objective.group.choose", objective("{size: 4, off_policy: 1, choose: longest}")),
    ("no rollout is left; raise group.size",
     objective("{size: 2, off_policy: 1}", terms=(ON, OFF), more="  replay: {}\n")),
    ("replay and group.prefix cannot be combined", objective(prefix(UNIFORM), terms=(ON, OFF), more="  replay: {}\n")),
    ("term 'traces' selects off_policy tokens but group.off_policy is 0", objective(terms=(ON, OFF))),
    ("no term learns from off_policy tokens; set it to 0", mixed(ON, ENTROPY)),
    ("replay has no effect: no term learns from off_policy tokens", objective(more="  replay: {}\n")),
    ("which a group of one row always is; remove it",
     objective("{size: 1, off_policy: 0, filter: {kind: dynamic_sampling}}", "{kind: gae}")),
    ("there are no traces where the accuracy of the group is above 0.5",
     objective(REPLACING, terms=(ON, term("{kind: nll}", "off_policy", OWN, gate="{group_accuracy_above: 0.5}")))),
    ("group_accuracy_at_most 0.25 has no effect, since traces come only where it is at most 0.25",
     objective(REPLACING, terms=(ON, term("{kind: nll}", "off_policy", OWN, gate="{group_accuracy_at_most: 0.25}")))),
]
TERMS = [
    ("no accuracy is above 0.5 and at most 0.5", only(gate="{group_accuracy_above: 0.5, group_accuracy_at_most: 0.5}")),
    ("low 2.0 must be below high 1.0", only(correction="{kind: mask, low: 2.0, high: 1.0}")),
    ("low has no effect with kind: truncate", only(correction="{kind: truncate, low: 0.5}")),
    ("prefix.length.rungs have 2 rows, which off_policy 1 has to equal, below size 4",
     objective(prefix("{kind: by_success, rungs: [{rows: 2, share: 0.5, below: 0.5}]}"), terms=(ON, OFF))),
    ("floor has no effect with token_weight: one; remove it",
     mixed(ON, term("{kind: nll, floor: 0.2}", "off_policy", OWN))),
    ("beta has no effect with measure: forward_kl; remove it",
     mixed(ON, term("{kind: divergence, measure: forward_kl, beta: 0.3}", normaliser=OWN))),
    ("divergences name different top_k [2, 3]; use one",
     mixed(ON, term("{kind: divergence, measure: jsd, top_k: 2}", normaliser=OWN),
           term("{kind: divergence, measure: jsd, top_k: 3}", normaliser=OWN).replace("extra", "other"))),
    ("evidence changes advantages, and nll has none", mixed(ON, term("{kind: nll}", "off_policy", OWN, evidence="{}"))),
    ("an auxiliary term has no part in the joint denominator; set population: own or all",
     mixed(ON, term("{kind: nll}", "off_policy"))),
    ("normaliser.before_gate has no effect with population: all",
     mixed(ON, term("{kind: nll}", "off_policy", "mode: token, population: all, before_gate: true",
                    gate="{outcome: wrong}"))),
    ("normaliser.before_gate has no effect without a gate", only(normaliser=f"{OWN}, before_gate: true")),
    ("normaliser.before_gate has no effect: no policy-gradient term has a gate", only(normaliser=BEFORE_GATE)),
    ("shaped_surrogate is for off-policy tokens; set select: off_policy", mixed(term(SHAPED, "response"))),
    ("multiple_importance is for off-policy tokens", mixed(term("{kind: multiple_importance}"))),
    ("aipo needs the sampler's log-probabilities; set select: on_policy", mixed(term("{kind: aipo}", "response"))),
    ("tv_masked_surrogate needs the sampler's log-probabilities",
     mixed(term("{kind: tv_masked_surrogate}", "response"))),
    ("kl needs the sampler's log-probabilities; set select: on_policy",
     mixed(ON, term("{kind: kl, estimator: k2, against: behavior}", "response", OWN))),
    ("correction needs the sampler's log-probabilities", mixed(term(select="response", correction=CORRECTION))),
    ("aipo already divides by the sampler's probability", only("{kind: aipo}", correction=CORRECTION)),
    ("terms named twice: rollouts; give each its own name", objective(terms=(ON, ON))),
    ("name different modes ['sequence', 'token']; use one",
     objective(terms=(ON, term(normaliser="mode: sequence, population: joint")))),
    ("terms that share the joint denominator differ in before_gate",
     objective(terms=(ON, term(gate="{outcome: wrong}", normaliser=BEFORE_GATE)))),
]
ADVANTAGES = [
    ("no term uses the advantage: this is supervised learning; use the sft stage", mixed(SFT)),
    ("advantage.off_policy_scale has no effect: no surrogate selects off-policy tokens",
     objective(advantage=mean("off_policy_scale: 0.5"))),
    ("advantage.k 5 must be below the 4 rows it chooses from",
     objective(advantage="{kind: pass_at_k, population: joint, k: 5}")),
    ("advantage.off_policy_scale has no effect: no surrogate", mixed(ON, SFT, advantage=mean("off_policy_scale: 0.5"))),
    ("advantage.on_policy_scale has no effect: no surrogate", mixed(OFF, advantage=mean("on_policy_scale: 0.5"))),
    ("advantage.on_policy_scale: 0 leaves the surrogates nothing to learn",
     objective(advantage=mean("on_policy_scale: 0"))),
    ("a baseline over 1 row of a group makes every advantage 0", objective("{size: 1, off_policy: 0}")),
    ("a baseline over 1 row of a group makes every advantage 0",
     objective("{size: 2, off_policy: 1}", ROLLOUTS_ONLY, (ON, SFT))),
    ("advantage.k 3 must be below the 3 rows it chooses from",
     mixed(ON, SFT, advantage="{kind: pass_at_k, population: on_policy, k: 3}")),
    ("advantage.k 2 must be below the 2 rows it chooses from",
     mixed(ON, SFT, advantage="{kind: pass_at_k, population: on_policy, k: 2}", more="  replay: {}\n")),
    ("so a surrogate on them would have no effect", mixed(ON, term(select="off_policy"), advantage=ROLLOUTS_ONLY)),
    ("advantage.population: on_policy has no effect without off-policy rows", objective(advantage=ROLLOUTS_ONLY)),
    ("so a surrogate on them would have no effect", mixed(ON, OFF, advantage=ROLLOUTS_ONLY)),
    ("so their continuations would not be learned from", objective(prefix(UNIFORM), ROLLOUTS_ONLY, (ON, SFT))),
    ("rl.critic: missing; objective.advantage.kind: gae needs it", objective(advantage="{kind: gae}")),
    ("advantage.off_policy_scale: 0 leaves the off-policy surrogate nothing to learn",
     mixed(ON, OFF, advantage=mean("off_policy_scale: 0"))),
    ("advantage.kind: gae has no effect: no surrogate uses it",
     mixed(term("{kind: nll}", normaliser=OWN, gate="{outcome: correct}"), SFT, advantage="{kind: gae}")),
    ("so a surrogate on them would have no effect", mixed(term(select="response"), advantage=ROLLOUTS_ONLY)),
    ("objective.replay.share 0.1 of 4 prompts per step is less than one prompt; raise it",
     mixed(ON, OFF, more="  replay: {share: 0.1}\n")),
    ("rl.critic.warmup_steps freezes the policy",
     interleaved(SFT).replace(MEAN, "{kind: gae}") + CRITIC.replace("}}}", "}, warmup_steps: 2}}")),
    ("warmup_steps 6 leaves none of the 6 RL steps to the policy",
     objective(advantage="{kind: gae}") + CRITIC.replace("}}}", "}, warmup_steps: 6}}")),
    ("a kl term against old has no effect with one optimizer step per RL step",
     objective(terms=(ON, term("{kind: kl, estimator: k2, against: old}", normaliser=OWN)))
     + "rl: {prompts_per_update: null}\n"),
    ("rl.critic has no effect with objective.advantage.kind: group_mean; remove it", objective() + CRITIC),
]
SUPERVISED = [
    ("terms rollouts: SFT has neither rollouts nor rewards; use nll or entropy", interleaved(ON)),
    ("terms extra: SFT has neither rollouts nor rewards", interleaved(term("{kind: nll}", normaliser=OWN))),
    ("a gate looks at rollouts, and SFT has none",
     interleaved(term("{kind: nll}", "off_policy", OWN, gate="{outcome: correct}"))),
    ("normaliser mode constant divides by rl.max_response_tokens; in SFT use token or sequence",
     interleaved(term("{kind: nll}", "off_policy", "mode: constant, population: own"))),
    ("a single SFT step has no earlier policy for the ratio of clipped_surrogate",
     interleaved(term("{kind: clipped_surrogate}", "off_policy", OWN))),
    ("terms named twice: sft", interleaved(SFT, SFT)),
    ("an adaptive coefficient reacts only to RL steps",
     interleaved(term("{kind: entropy}", "off_policy", OWN, coefficient="{kind: adaptive, start: 0.01, target: 1}"),
                 SFT)),
]
# fmt: on
CASES = [*SCHEDULES_AND_LOSSES, *HINTS, *GROUPS, *TERMS, *ADVANTAGES, *SUPERVISED]


@pytest.mark.parametrize(("fragment", "text"), CASES, ids=[fragment for fragment, _ in CASES])
def test_a_combination_without_sense_is_refused_in_one_line(tmp_path: Path, fragment: str, text: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(f"extends: {SMOKE}\nchain: rl\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_experiment(file)
    (line,) = str(caught.value).splitlines()
    assert fragment in line


@pytest.mark.parametrize(
    "text", [objective(), mixed(ON, OFF, ENTROPY), mixed(ON, SFT, advantage=ROLLOUTS_ONLY), interleaved(SFT)]
)
def test_what_the_refusals_start_from_is_accepted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(f"extends: {SMOKE}\nchain: rl\n{text}")
    assert load_experiment(file).objective is not None


def test_the_schedule_of_an_interleaved_term_depends_on_the_length_of_the_stage(tmp_path: Path) -> None:
    def depends(coefficient: str) -> bool:
        file = tmp_path / "experiment.yaml"
        file.write_text(f"extends: {SMOKE}\nchain: rl\n{interleaved(SFT.replace('loss:', coefficient + ', loss:'))}")
        objective = load_experiment(file).objective
        assert objective is not None
        return objective.depends_on_length

    assert not depends("coefficient: 0.5")
    assert depends("coefficient: {kind: linear, start: 1.0, end: 0.5}")


STALE = ("chain=rl", "cluster=ray", "rl.max_staleness=1")


def test_a_correction_goes_to_the_on_policy_surrogates_without_one() -> None:
    settings = rl_settings(*STALE, "method=luffy", "rl.correction={kind: truncate}")
    corrected = {term.name: term.correction for term in settings.objective.terms}
    assert corrected["on_policy"] is not None and corrected["on_policy"].high == 2.0
    assert corrected["off_policy"] is None and corrected["entropy"] is None
    assert settings.rl.correction is None  # it is part of the objective now


def test_terms_that_learn_from_rollouts_by_their_outcome_are_corrected_too() -> None:
    def blind(*overrides: str) -> set[str]:
        terms = rl_settings(*STALE, "method=srft", *overrides).objective.terms
        return {term.name for term in terms if term.takes_sampler_for_trainer}

    assert blind() == {"right", "wrong"}
    assert blind("rl.correction={kind: mask}") == set()
