"""Every combination of objective options that contradicts itself, or would have no effect, is refused in one line."""

import pytest
from support.refusals import refused
from synthetic.settings import SMOKE, rl_settings

from luffy.config import load_experiment
from luffy.errors import ConfigError

OWN = "mode: token, population: own"
JOINT = "mode: token, population: joint"
BEFORE_GATE = f"{JOINT}, before_gate: true"
RATIONAL = "{kind: shaped_surrogate, shaping: {kind: rational}}"
ON = f"{{name: rollouts, select: on_policy, loss: {{kind: surrogate}}, normaliser: {{{JOINT}}}}}"
OFF = f"{{name: traces, select: off_policy, loss: {RATIONAL}, normaliser: {{{JOINT}}}}}"
SFT = f"{{name: sft, select: off_policy, loss: {{kind: nll}}, normaliser: {{{OWN}}}}}"
ENTROPY = f"{{name: entropy, select: response, loss: {{kind: entropy}}, normaliser: {{{OWN}}}}}"
MEAN = "{kind: group_mean, population: joint, scale_by_std: false}"
ROLLOUTS_ONLY = "{kind: group_mean, population: on_policy, scale_by_std: false}"
GAE = "{kind: gae}"
MIXED = "{size: 4, off_policy: 1}"
UNIFORM = "{kind: uniform, low: 0.0, high: 1.0}"
REPLAY = ", replay: {}"
STEPWISE = "rl.prompts_per_update=null"


def objective(
    group: str = "{size: 4, off_policy: 0}", advantage: str = MEAN, terms: tuple[str, ...] = (ON,), more: str = ""
) -> str:
    return f"objective={{group: {group}, advantage: {advantage}, terms: [{', '.join(terms)}]{more}}}"


def mixed(*terms: str, advantage: str = MEAN, more: str = "") -> str:
    return objective(MIXED, advantage, terms, more)


def term(loss: str = "surrogate", select: str = "on_policy", normaliser: str = JOINT, **more: str) -> str:
    """A further term; `loss` is its kind, with settings after a comma."""
    added = "".join(f", {key}: {value}" for key, value in more.items())
    return f"{{name: extra, select: {select}, loss: {{kind: {loss}}}, normaliser: {{{normaliser}}}{added}}}"


def only(*of_term: str, **more: str) -> str:
    return objective(terms=(term(*of_term, **more),))


def prefix(length: str, off_policy: int = 1) -> str:
    return f"{{size: 4, off_policy: {off_policy}, prefix: {{length: {length}}}}}"


def interleaved(*terms: str, advantage: str = MEAN) -> str:
    return objective(advantage=advantage, more=f", interleaved_sft: {{buffer_size: 2, terms: [{', '.join(terms)}]}}")


def hint(learn: str = "hinted", keep: str = "first_correct", levels: str = "[0.5]", off_policy: int = 0) -> str:
    return f"{{size: 4, off_policy: {off_policy}, hint: {{levels: {levels}, keep: {keep}, learn: {learn}}}}}"


def critic(more: str = "") -> str:
    return f"rl.critic={{optimizer: {{lr: 1e-5}}{more}}}"


BARE = hint("bare")
IN_GROUPS = hint("hinted, groups: {}", "all")
LOG = "shaped_surrogate, shaping: {kind: log}, min_weight: 1.0, max_weight: 0.5"
REPLACING = "{size: 4, off_policy: 1, off_policy_when_accuracy_at_most: 0.25}"
NO_EFFECT_ON_TRACES = "so a surrogate on them would have no effect"
RUNGS = "{kind: by_success, rungs: [{rows: 2, share: 0.5, below: 0.5}]}"

# What the line has to name, with `..` between its parts, and the overrides.
# fmt: off
REFUSED = {
    "losses and coefficients": [
        ("dual_clip 1.1 .. 1 + clip_high 1.2", only("clipped_surrogate, dual_clip: 1.1")),
        ("min_weight 1.0 .. max_weight 0.5", mixed(term(LOG, "off_policy"))),
        ("warmup 0.6 .. decay 0.6",
         only(coefficient="{kind: warmup_cosine, start: 0.0, peak: 1.0, end: 0.5, warmup: 0.6, decay: 0.6}")),
        ("schedule from 0.5 to 0.5", only(coefficient="{kind: cosine, start: 0.5, end: 0.5}")),
        ("f lies between 0 and 1 .. gradient",
         mixed(term("shaped_surrogate, shaping: {kind: rational}, max_weight: -1.0", "off_policy"))),
        ("schedule that is 1.0",
         only(coefficient="{kind: warmup_cosine, start: 1, peak: 1, end: 1, warmup: 0.1, decay: 0.5}")),
        ("coefficient 0 has no effect", only(coefficient="0.0")),
        ("coefficient.kind: adaptive is gone .. schedule",
         objective(terms=(ON, term("entropy", normaliser=OWN, coefficient="{kind: adaptive, start: 1, target: 1}")))),
    ],
    "hints": [
        ("levels [0.5, 0.5] must rise", objective(hint("bare", levels="[0.5, 0.5]"), terms=(ON, OFF))),
        ("group.hint.levels.0", objective(hint("bare", levels="[1.0]"), terms=(ON, OFF))),
        ("template .. {hint} once", objective(hint("hinted, template: '{prompt}'"))),
        ("hint .. off_policy: 0", objective(hint(off_policy=1))),
        ("hint: 5 rows .. size 4", objective(hint(keep="all, rows_per_level: 5"))),
        ("fewer wrong rollouts than the 3 rows",
         objective(hint(keep="all, rows_per_level: 3, accuracy_at_most: 0.5"))),
        # 29 of 100 are at most 0.29, though 0.29 * 100 is 28.999999999999996
        ("fewer wrong rollouts than the 72 rows",
         objective(hint(keep="all, rows_per_level: 72, accuracy_at_most: 0.29").replace("size: 4", "size: 100"))),
        ("group.hint .. learn: bare", objective(BARE)),
        ("behavior: recorded", objective(BARE, terms=(ON, OFF))),
        ("'extra': clipped_surrogate", objective(BARE, terms=(term("clipped_surrogate", "response"),))),
        ("'extra': multiple_importance", objective(BARE, terms=(ON, term("multiple_importance", "off_policy")))),
        ("groups .. keep: all", objective(hint("hinted, groups: {}"))),
        ("after has no effect with groups", objective(hint("hinted, groups: {}", "all, after: 0.1"))),
        ("groups.level runs from 2 to 2 .. levels 1 to 1", objective(hint("hinted, groups: {level: 2}", "all"))),
        ("fewer_above 0.4 .. more_below 0.5", objective(IN_GROUPS.replace(
            "groups: {}", "groups: {level: {kind: by_history, more_below: 0.5, fewer_above: 0.4}}"))),
        ("off_policy tokens .. group.off_policy is 0", objective(hint(), terms=(ON, OFF))),
        ("replay and group.hint", objective(BARE, terms=(ON, SFT), more=REPLAY)),
    ],
    "groups": [
        ("off_policy 4 .. size 4", objective("{size: 4, off_policy: 4}")),
        ("off_policy 5 .. size 4", objective(prefix(UNIFORM, 5))),
        ("prefix has no effect .. off_policy: 0", objective(prefix(UNIFORM, 0))),
        ("low runs from -0.1 to -0.1", objective(prefix("{kind: uniform, low: -0.1, high: 1}"))),
        ("high runs from 0 to 2",
         objective(prefix("{kind: uniform, low: 0.0, high: {kind: linear, start: 0.0, end: 2.0}}"))),
        ("probability runs from 1.5 to 1.5", objective(prefix("{kind: binomial, probability: 1.5}"))),
        ("low 0.5 .. high 0.5", objective(prefix("{kind: evenly_spaced, low: 0.5, high: 0.5}"))),
        ("shared .. length.kind: evenly_spaced", objective(prefix("{kind: evenly_spaced}, shared: true"))),
        ("off_policy_when_accuracy_at_most .. off_policy: 0", objective(REPLACING.replace("y: 1", "y: 0"))),
        ("off_policy_when_accuracy_at_most .. after the rollouts",
         objective(REPLACING.replace("}", f", prefix: {{length: {UNIFORM}}}}}"))),
        ("choose: likeliest_answer .. off_policy_when_accuracy_at_most",
         objective("{size: 4, off_policy: 1, choose: likeliest_answer}")),
        ("objective.group.choose", objective("{size: 4, off_policy: 1, choose: longest}")),
        ("no rollout is left .. group.size", objective("{size: 2, off_policy: 1}", terms=(ON, OFF), more=REPLAY)),
        ("replay and group.prefix", objective(prefix(UNIFORM), terms=(ON, OFF), more=REPLAY)),
        ("'traces' .. off_policy tokens .. group.off_policy is 0", objective(terms=(ON, OFF))),
        ("no term learns from off_policy tokens; set it to 0", mixed(ON, ENTROPY)),
        ("replay has no effect: no term learns from off_policy tokens", objective(more=REPLAY)),
        ("a group of one row", objective("{size: 1, off_policy: 0, filter: {kind: dynamic_sampling}}", GAE)),
        ("no traces .. above 0.5",
         objective(REPLACING, terms=(ON, term("nll", "off_policy", OWN, gate="{group_accuracy_above: 0.5}")))),
        ("group_accuracy_at_most 0.25 has no effect",
         objective(REPLACING, terms=(ON, term("nll", "off_policy", OWN, gate="{group_accuracy_at_most: 0.25}")))),
        ("prefix.length.rungs have 2 rows .. off_policy 1", objective(prefix(RUNGS), terms=(ON, OFF))),
    ],
    "terms": [
        ("above 0.5 and at most 0.5", only(gate="{group_accuracy_above: 0.5, group_accuracy_at_most: 0.5}")),
        ("low 2.0 .. high 1.0", only(correction="{kind: mask, low: 2.0, high: 1.0}")),
        ("low has no effect .. kind: truncate", only(correction="{kind: truncate, low: 0.5}")),
        ("floor has no effect .. token_weight: one", mixed(ON, term("nll, floor: 0.2", "off_policy", OWN))),
        ("beta has no effect .. measure: forward_kl",
         mixed(ON, term("divergence, measure: forward_kl, beta: 0.3", normaliser=OWN))),
        ("divergences .. top_k [2, 3]",
         mixed(ON, term("divergence, measure: jsd, top_k: 2", normaliser=OWN),
               term("divergence, measure: jsd, top_k: 3", normaliser=OWN).replace("extra", "other"))),
        ("evidence .. nll", mixed(ON, term("nll", "off_policy", OWN, evidence="{}"))),
        ("joint denominator .. population: own", mixed(ON, term("nll", "off_policy"))),
        ("normaliser.before_gate .. population: all",
         mixed(ON, term("nll", "off_policy", BEFORE_GATE.replace("joint", "all"), gate="{outcome: wrong}"))),
        ("normaliser.before_gate .. without a gate", only(normaliser=f"{OWN}, before_gate: true")),
        ("normaliser.before_gate .. no policy-gradient term", only(normaliser=BEFORE_GATE)),
        ("shaped_surrogate .. select: off_policy", mixed(term(RATIONAL[7:-1], "response"))),
        ("multiple_importance .. off-policy", mixed(term("multiple_importance"))),
        ("aipo .. select: on_policy", mixed(term("aipo", "response"))),
        ("tv_masked_surrogate .. log-probabilities", mixed(term("tv_masked_surrogate", "response"))),
        ("kl .. select: on_policy", mixed(ON, term("kl, estimator: k2, against: behavior", "response", OWN))),
        ("correction .. log-probabilities", mixed(term(select="response", correction="{kind: truncate}"))),
        ("aipo already divides", only("aipo", correction="{kind: truncate}")),
        ("terms named twice: rollouts", objective(terms=(ON, ON))),
        ("modes ['sequence', 'token']", objective(terms=(ON, term(normaliser="mode: sequence, population: joint")))),
        ("joint denominator .. before_gate",
         objective(terms=(ON, term(gate="{outcome: wrong}", normaliser=BEFORE_GATE)))),
    ],
    "advantages": [
        ("no term uses the advantage .. sft stage", mixed(SFT)),
        ("advantage.k 5 .. 4 rows", objective(advantage="{kind: pass_at_k, population: joint, k: 5}")),
        ("advantage.k 3 .. 3 rows", mixed(ON, SFT, advantage="{kind: pass_at_k, population: on_policy, k: 3}")),
        ("advantage.k 2 .. 2 rows",
         mixed(ON, SFT, advantage="{kind: pass_at_k, population: on_policy, k: 2}", more=REPLAY)),
        ("1 row of a group .. advantage 0", objective("{size: 1, off_policy: 0}")),
        ("1 row of a group .. advantage 0", objective("{size: 2, off_policy: 1}", ROLLOUTS_ONLY, (ON, SFT))),
        (NO_EFFECT_ON_TRACES, mixed(ON, term(select="off_policy"), advantage=ROLLOUTS_ONLY)),
        (NO_EFFECT_ON_TRACES, mixed(ON, OFF, advantage=ROLLOUTS_ONLY)),
        (NO_EFFECT_ON_TRACES, mixed(term(select="response"), advantage=ROLLOUTS_ONLY)),
        ("advantage.population: on_policy .. without off-policy rows", objective(advantage=ROLLOUTS_ONLY)),
        ("continuations would not be learned from", objective(prefix(UNIFORM), ROLLOUTS_ONLY, (ON, SFT))),
        ("rl.critic: missing .. objective.advantage.kind: gae", objective(advantage=GAE)),
        ("advantage.kind: gae has no effect",
         mixed(term("nll", normaliser=OWN, gate="{outcome: correct}"), SFT, advantage=GAE)),
        ("objective.replay.share 0.1 of 4 prompts", mixed(ON, OFF, more=", replay: {share: 0.1}")),
        ("rl.critic.warmup_steps freezes", interleaved(SFT, advantage=GAE), critic(", warmup_steps: 2")),
        ("warmup_steps 6 .. 6 RL steps", objective(advantage=GAE), critic(", warmup_steps: 6")),
        ("kl term against old .. one optimizer step",
         objective(terms=(ON, term("kl, estimator: k2, against: old", normaliser=OWN))), STEPWISE),
        ("rl.critic has no effect .. group_mean", objective(), critic()),
    ],
    "supervised terms": [
        ("terms rollouts .. nll or entropy", interleaved(ON)),
        ("terms extra .. neither rollouts nor rewards", interleaved(term("nll", normaliser=OWN))),
        ("gate .. SFT", interleaved(term("nll", "off_policy", OWN, gate="{outcome: correct}"))),
        ("mode constant .. rl.max_response_tokens",
         interleaved(term("nll", "off_policy", "mode: constant, population: own"))),
        ("SFT step .. clipped_surrogate", interleaved(term("clipped_surrogate", "off_policy", OWN))),
        ("terms named twice: sft", interleaved(SFT, SFT)),
    ],
}
# fmt: on
CASES = [(overrides, named) for cases in REFUSED.values() for named, *overrides in cases]


@pytest.mark.parametrize(("overrides", "named"), CASES, ids=[named for _, named in CASES])
def test_a_combination_without_sense_is_refused_in_one_line(overrides: list[str], named: str) -> None:
    with refused(*named.split(" .. "), error=ConfigError):
        load_experiment(SMOKE, ["chain=rl", *overrides])


@pytest.mark.parametrize(
    "accepted", [objective(), mixed(ON, OFF, ENTROPY), mixed(ON, SFT, advantage=ROLLOUTS_ONLY), interleaved(SFT)]
)
def test_what_the_refusals_start_from_is_accepted(accepted: str) -> None:
    assert load_experiment(SMOKE, ["chain=rl", accepted]).objective is not None


@pytest.mark.parametrize(("coefficient", "depends"), [("0.5", False), ("{kind: linear, start: 1.0, end: 0.5}", True)])
def test_the_schedule_of_an_interleaved_term_depends_on_the_length_of_the_stage(coefficient, depends) -> None:
    scheduled = interleaved(SFT.replace("loss:", f"coefficient: {coefficient}, loss:"))
    objective = load_experiment(SMOKE, ["chain=rl", scheduled]).objective
    assert objective is not None and objective.depends_on_length is depends


STALE = ("chain=rl", "cluster=ray", "rl.max_staleness=1")


def test_a_correction_goes_to_the_on_policy_surrogates_without_one() -> None:
    settings = rl_settings(*STALE, "method=luffy", "rl.correction={kind: truncate}")
    corrected = {term.name: term.correction for term in settings.objective.terms}
    assert corrected["on_policy"] is not None and corrected["on_policy"].high == 2.0
    assert corrected["off_policy"] is None and corrected["entropy"] is None
    assert settings.rl.correction is None  # it is part of the objective now


@pytest.mark.parametrize(
    ("correction", "uncorrected"), [((), {"right", "wrong"}), (("rl.correction={kind: mask}",), set())]
)
def test_terms_that_learn_from_rollouts_by_their_outcome_are_corrected_too(correction, uncorrected) -> None:
    terms = rl_settings(*STALE, "method=srft", *correction).objective.terms
    assert {term.name for term in terms if term.takes_sampler_for_trainer} == uncorrected
