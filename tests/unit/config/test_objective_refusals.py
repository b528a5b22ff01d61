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
REPLAY = ", replay: {}"
STEPWISE = "rl.prompts_per_update=null"


def given(show: str, more: str = "", size: int = 4) -> str:
    """A group with one start; `show` is its kind, with settings after a comma."""
    return f"{{size: {size}, starts: {{s: {{show: {{kind: {show}}}{', ' * bool(more)}{more}}}}}}}"


MIXED = given("trace")


def objective(group: str = "{size: 4}", advantage: str = MEAN, terms: tuple[str, ...] = (ON,), more: str = "") -> str:
    return f"objective={{group: {group}, advantage: {advantage}, terms: [{', '.join(terms)}]{more}}}"


def mixed(*terms: str, advantage: str = MEAN, more: str = "") -> str:
    return objective(MIXED, advantage, terms, more)


def term(loss: str = "surrogate", select: str = "on_policy", normaliser: str = JOINT, **more: str) -> str:
    """A further term; `loss` is its kind, with settings after a comma."""
    added = "".join(f", {key}: {value}" for key, value in more.items())
    return f"{{name: extra, select: {select}, loss: {{kind: {loss}}}, normaliser: {{{normaliser}}}{added}}}"


def only(*of_term: str, **more: str) -> str:
    return objective(terms=(term(*of_term, **more),))


def prefix(dose: str, more: str = "") -> str:
    return given("prefix", f"dose: {dose}{more}")


def both(one: str, other: str) -> str:
    """A group with the starts of two."""
    return one.removesuffix("}}") + other.replace("{size: 4, starts: {s:", ", t:")


def interleaved(*terms: str, advantage: str = MEAN) -> str:
    return objective(advantage=advantage, more=f", interleaved_sft: {{buffer_size: 2, terms: [{', '.join(terms)}]}}")


def critic(more: str = "") -> str:
    return f"rl.critic={{optimizer: {{lr: 1e-5}}{more}}}"


FAILED = "when: {accuracy_at_most: 0.0}"
BARE = given("hint", f"dose: 0.5, {FAILED}, rows: 4")
HINTED = given("hint", "dose: 0.5, rows: all, learn: shown")
BESIDE = given("hint", f"dose: 0.5, {FAILED}, rows: 4, keep: beside")
EACH = "critique, about: each, wrong: 'No.', template: '{prompt} {response} {feedback}'"
ALL = "critique, about: all, wrong: 'No.', template: '{prompt} {feedback}'"
LOG = "shaped_surrogate, shaping: {kind: log}, min_weight: 1.0, max_weight: 0.5"
REPLACING = given("trace", "when: {accuracy_at_most: 0.25}")
NO_EFFECT_ON_TRACES = "so a surrogate on them would have no effect"
RUNGS = "{kind: ladder, rungs: [{rows: 2, share: 0.5, below: 0.5}]}"
LADDER = prefix(RUNGS, ", rows: 2")
SEARCH = f"show: {{kind: prefix, pieces: 10}}, dose: {{kind: search}}, rows: all, keep: nearest, {FAILED}"
DIFFICULTY = "{kind: difficulty, low: 0.1, high: 0.9}"
BISECTION, RATIO, FIT = "{kind: prompt_bisection}", "{kind: batch_ratio}", "{kind: fit}"


def searched(more: str = "", size: int = 4, **changes: str) -> str:
    """A search with some of its settings changed."""
    settings = SEARCH.replace("kind: search", f"kind: search{', ' * bool(more)}{more}")
    for old, new in changes.items():
        settings = settings.replace(*{"pieces": (", pieces: 10", new), "bound": ("most: 0.0", f"most: {new}")}[old])
    return f"{{size: {size}, starts: {{s: {{{settings}}}}}}}"


# A group, and what the line has to name.
# fmt: off
STARTS = [
    # What is shown.
    ("starts.s.show .. template .. {hint} once", given("hint, template: '{prompt}'", "dose: 0.5")),
    ("starts.s.show .. template .. {feedback} once", given(ALL.replace(" {feedback}", ""), FAILED)),
    ("{response} has no meaning with about: all", given(ALL.replace("{feedback}", "{response} {feedback}"), FAILED)),
    ("right has no effect with about: all", given(f"{ALL}, right: 'Yes.'", FAILED)),
    ("starts.s.show.pieces .. 2", given("prefix, pieces: 1", "dose: 0.5")),
    # How much.
    ("show.kind: prefix needs a dose", given("prefix")),
    ("show.kind: hint needs a dose", given("hint")),
    ("dose has no effect with show.kind: trace", given("trace", "dose: 0.5")),
    ("dose has no effect with show.kind: critique", given(ALL, f"dose: 0.5, {FAILED}")),
    ("dose runs from 1.5 to 1.5", prefix("1.5")),
    ("dose .. low runs from -0.1 to -0.1", prefix("{kind: uniform, low: -0.1, high: 1}")),
    ("dose .. high runs from 0 to 2",
     prefix("{kind: uniform, low: 0.0, high: {kind: linear, start: 0.0, end: 2.0}}")),
    ("dose .. probability runs from 1.5 to 1.5", prefix("{kind: binomial, probability: 1.5}")),
    ("dose .. envelope runs from 0 to 2", prefix("{kind: batch_root, envelope: {kind: linear, start: 2, end: 0}}")),
    ("dose .. low 0.5 .. high 0.5", prefix("{kind: even, low: 0.5, high: 0.5}")),
    ("dose .. low 0.5 .. high 0.4", prefix("{kind: difficulty, low: 0.5, high: 0.4}")),
    ("dose .. shares [0.5, 0.5] must rise", prefix("{kind: levels, shares: [0.5, 0.5]}", ", rows: 2")),
    ("dose .. shares [0.5, 0.2] must rise", prefix("{kind: prompt_levels, shares: [0.5, 0.2], more_below: 0.5}")),
    ("fewer_above 0.4 .. more_below 0.5",
     prefix("{kind: prompt_levels, shares: [0.5], more_below: 0.5, fewer_above: 0.4}")),
    ("dose .. at_least 0.8 .. at_most 0.2", searched("at_least: 0.8, at_most: 0.2")),
    # Which groups.
    ("starts.s.when .. one of share, accuracy_at_most and pass_rate_at_most, not none", given("trace", "when: {}")),
    ("starts.s.when .. not share and pass_rate_at_most",
     given("trace", "when: {share: 0.5, pass_rate_at_most: 0.5}")),
    ("after has no effect without accuracy_at_most", given("trace", "when: {share: 0.5, after: 0.1}")),
    ("memory has no effect without pass_rate_at_most", given("trace", "when: {share: 0.5, memory: 0.1}")),
    # Which rows, and how they are learned.
    ("learn: shown .. a prefix is in the response", prefix("0.5", ", learn: shown")),
    ("shared contradicts dose.kind: even", prefix("{kind: even}", ", shared: true")),
    ("shared contradicts dose.kind: ladder", prefix(RUNGS, ", rows: 2, shared: true")),
    ("shared contradicts show.kind: trace", given("trace", "shared: true")),
    ("shared contradicts show.kind: critique", given(ALL, f"shared: true, {FAILED}")),
    ("dose.kind: fit is a share of a prefix .. show.kind: prefix", given("hint", f"rows: 4, dose: {FIT}")),
    ("dose.rungs have 2 rows .. rows, 1", prefix(RUNGS)),
    ("rows: 3 .. multiple of the 2 shares", prefix("{kind: levels, shares: [0.2, 0.5]}", ", rows: 3")),
    ("rows: all .. multiple of the 2 shares", prefix("{kind: levels, shares: [0.2, 0.5]}", ", rows: all")),
    ("rows: 3 .. dose.rounds, 4", prefix(FIT, ", rows: 3")),
    ("rows, 6, .. dose.rounds, 4", given("prefix", f"dose: {FIT}, rows: all", 6)),
    ("dose.kind: search .. show.pieces", searched(pieces="")),
    ("dose.kind: search .. rows: all, keep: nearest, when.accuracy_at_most",
     searched().replace("keep: nearest", "keep: all")),
    ("when.accuracy_at_most 0.5 .. dose.at_least 0.25", searched(bound="0.5")),
    ("keep: nearest is for dose.kind: search", given("hint", f"dose: 0.5, keep: nearest, {FAILED}")),
    ("dose.kind: prompt_bisection .. shared: true", prefix(BISECTION)),
    ("dose.kind: prompt_frontier .. shared: true", prefix("{kind: prompt_frontier}")),
    ("dose.kind: batch_ratio .. when.accuracy_at_most", given("hint", f"dose: {RATIO}, {FAILED}")),
    ("dose.kind: difficulty looks at rollouts", prefix(DIFFICULTY, ", rows: all")),
    ("dose.kind: difficulty looks at rollouts", prefix(DIFFICULTY, f", {FAILED}")),
    ("dose.kind: ladder looks at rollouts", prefix(RUNGS, f", rows: 2, {FAILED}")),
    ("dose.kind: fit has rounds of its own", prefix(FIT, f", rows: 4, {FAILED}")),
    ("show.kind: critique .. when: {accuracy_at_most: 1}", given(ALL)),
    ("keep: best .. when.accuracy_at_most", given("hint", "dose: 0.5, keep: best")),
    ("keep: beside .. show.kind to hint or critique", prefix("0.5", f", keep: beside, {FAILED}")),
    ("keep: beside .. learn: bare", given(ALL, f"keep: beside, learn: shown, {FAILED}")),
    ("keep has no effect on whole traces", given("trace", f"keep: best, {FAILED}")),
    ("rows: all leaves no rollouts beside whole traces", given("trace", "rows: all")),
    ("show.choose: likeliest_answer .. when.accuracy_at_most", given("trace, choose: likeliest_answer")),
    # Beside other starts, and in the group.
    ("starts s and t both sample again", both(given(ALL, FAILED), BARE)),
    ("starts s and t both take all rows", both(HINTED, prefix("0.5", ", rows: all"))),
    ("4 of s rows .. below size 4", given("trace", "rows: 4")),
    ("3 of s + 2 of t rows .. below size 4", both(prefix("0.5", ", rows: 3"), prefix("0.5", ", rows: 2"))),
    ("4 of s rows .. below size 4", prefix(RUNGS.replace("rows: 2", "rows: 4"), ", rows: 4")),
    ("4 of s rows .. below size 4", both(prefix("0.5", ", rows: 4"), HINTED)),
    ("starts.s.when.pass_rate_at_most depends on rollouts",
     prefix("0.5", ", rows: 4, when: {pass_rate_at_most: 0.5}")),
    ("starts.s.when.pass_rate_at_most depends on rollouts",
     prefix("0.5", ", rows: all, when: {pass_rate_at_most: 0.5}")),
    ("starts.s.dose: .. size 4 .. between 0.3 and 0.4", searched("at_least: 0.3, at_most: 0.4")),
    ("starts.s.rows 4 .. below size 4", given("trace", f"rows: 4, {FAILED}")),
    ("starts.s: 5 rows .. size 4", given("hint", f"dose: 0.5, rows: 5, {FAILED}")),
    # 29 of 100 are at most 0.29, though 0.29 * 100 is 28.999999999999996
    ("fewer wrong rollouts than the 72 rows",
     given("hint", "dose: 0.5, rows: 72, when: {accuracy_at_most: 0.29}", 100)),
    ("objective.group.starts.Mine", "{size: 4, starts: {Mine: {show: {kind: trace}}}}"),
]
# fmt: on

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
    "starts": [(named, objective(group)) for named, group in STARTS],
    "groups": [
        ("group.starts.s .. learn: bare", objective(BARE)),
        ("keep: beside has no effect with group.filter",
         objective(BESIDE.replace("size: 4", "size: 4, filter: {kind: drop_zero_variance}"), terms=(ON, SFT))),
        ("keep: beside .. advantage.kind: gae", objective(BESIDE, GAE, (ON, SFT)), critic()),
        ("'traces' has no effect .. keep: beside",
         objective(BESIDE, terms=(ON, OFF.replace("kind: rational}", "kind: rational}, behavior: recorded")))),
        ("group.starts.s .. show.kind: trace", mixed(ON, ENTROPY)),
        ("behavior: recorded", objective(BARE, terms=(ON, OFF))),
        ("'extra': clipped_surrogate .. learn: shown", objective(BARE, terms=(term("clipped_surrogate", "response"),))),
        ("'extra': multiple_importance", objective(BARE, terms=(ON, term("multiple_importance", "off_policy")))),
        ("off_policy tokens .. group.starts gives rows none", objective(HINTED, terms=(ON, OFF))),
        ("replay and group.starts.s .. show.kind: hint", objective(BARE, terms=(ON, SFT), more=REPLAY)),
        ("replay and group.starts.s .. show.kind: prefix", objective(prefix("0.5"), terms=(ON, OFF), more=REPLAY)),
        ("no rollout is left .. group.size", objective(given("trace", size=2), terms=(ON, OFF), more=REPLAY)),
        ("replay has no effect: no term learns from off_policy tokens", objective(more=REPLAY)),
        ("a group of one row", objective("{size: 1, filter: {kind: dynamic_sampling}}", GAE)),
        ("no traces .. above 0.5",
         objective(REPLACING, terms=(ON, term("nll", "off_policy", OWN, gate="{group_accuracy_above: 0.5}")))),
        ("group_accuracy_at_most 0.25 has no effect",
         objective(REPLACING, terms=(ON, term("nll", "off_policy", OWN, gate="{group_accuracy_at_most: 0.25}")))),
    ],
    "terms": [
        ("above 0.5 and at most 0.5", only(gate="{group_accuracy_above: 0.5, group_accuracy_at_most: 0.5}")),
        ("low 2.0 .. high 1.0", only(correction="{kind: mask, low: 2.0, high: 1.0}")),
        ("low has no effect .. kind: truncate", only(correction="{kind: truncate, low: 0.5}")),
        ("floor has no effect .. token_weight: one", mixed(ON, term("nll, floor: 0.2", "off_policy", OWN))),
        ("beta has no effect .. measure: forward_kl",
         mixed(ON, term("divergence, measure: forward_kl, beta: 0.3", normaliser=OWN))),
        ("divergences .. top_k (2, 3)",
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
        ("1 row of a group .. advantage 0", objective("{size: 1}")),
        ("1 row of a group .. advantage 0", objective(given("trace", size=2), ROLLOUTS_ONLY, (ON, SFT))),
        (NO_EFFECT_ON_TRACES, mixed(ON, term(select="off_policy"), advantage=ROLLOUTS_ONLY)),
        (NO_EFFECT_ON_TRACES, mixed(term(select="response"), advantage=ROLLOUTS_ONLY)),
        ("advantage.population: on_policy .. without off-policy rows", objective(advantage=ROLLOUTS_ONLY)),
        ("continuations would not be learned from", objective(prefix("0.5"), ROLLOUTS_ONLY, (ON, SFT))),
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
    "accepted",
    [
        *(objective(), mixed(ON, OFF, ENTROPY), mixed(ON, SFT, advantage=ROLLOUTS_ONLY), interleaved(SFT)),
        *(objective(BARE, terms=(ON, SFT)), objective(HINTED), objective(both(MIXED, LADDER), terms=(ON, OFF))),
        *(objective(group, terms=(ON, OFF)) for group in (REPLACING, LADDER, searched(), prefix(FIT, ", rows: 4"))),
        *(objective(prefix(dose, ", shared: true"), terms=(ON, OFF)) for dose in (BISECTION, RATIO)),
        *(objective(given(critique, FAILED), terms=(ON, SFT)) for critique in (EACH, ALL)),
        objective(prefix(DIFFICULTY), terms=(ON, OFF)),
    ],
)
def test_what_the_refusals_start_from_is_accepted(accepted: str) -> None:
    assert load_experiment(SMOKE, ["chain=rl", accepted]).objective is not None


@pytest.mark.parametrize(("coefficient", "depends"), [("0.5", False), ("{kind: linear, start: 1.0, end: 0.5}", True)])
def test_the_schedule_of_an_interleaved_term_depends_on_the_length_of_the_stage(coefficient, depends) -> None:
    scheduled = interleaved(SFT.replace("loss:", f"coefficient: {coefficient}, loss:"))
    objective = load_experiment(SMOKE, ["chain=rl", scheduled]).objective
    assert objective is not None and objective.depends_on_length is depends


STALE = ("chain=rl", "cluster=ray", "rl.max_staleness=1")


def test_a_correction_goes_to_terms_that_learn_from_rollouts_and_have_none() -> None:
    settings = rl_settings(*STALE, "method=luffy", "rl.correction={kind: truncate}")
    corrected = {term.name: term.correction for term in settings.objective.terms}
    assert corrected["on_policy"] is not None and corrected["on_policy"].high == 2.0
    assert corrected["off_policy"] is None and corrected["entropy"] is None
    assert settings.rl.correction is None  # it is part of the objective now
    for correction, uncorrected in (((), {"right", "wrong"}), (("rl.correction={kind: mask}",), set())):
        terms = rl_settings(*STALE, "method=srft", *correction).objective.terms  # two learn by their outcome
        assert {term.name for term in terms if term.takes_sampler_for_trainer} == uncorrected
