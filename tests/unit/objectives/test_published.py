"""Every value that a preset sets, against the publication or code that it is from.

A row holds what differs from `ORDINARY`, as words of `key=value`; the value of a `kind` stands alone. Where no
publication gives a value, the source says so.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from reference.taught_presets import SUPERVISED, teacher_overrides

from luffy.config import available_presets
from luffy.config.load import resolve_experiment
from luffy.config.training import SelfTeacher
from luffy.config.yaml_source import Value

METHODS = Path(__file__).parents[3] / "exp_configs/methods"
BASE: dict[str, Value] = {
    "name": "bare",
    "data": {
        "train": {"kind": "file", "path": "train.jsonl"},
        "suites": {"held_out": {"kind": "file", "path": "test.jsonl"}},
        "max_prompt_tokens": 8,
        "max_trace_tokens": 8,
    },
    "model": {"path": "model"},
    "rl": {"steps": 10, "prompts_per_step": 8, "max_response_tokens": 8, "optimizer": {"lr": 1e-6}},
    "evaluation": {"decodings": {"greedy": {"temperature": 0.0}}, "max_response_tokens": 8},
}
ORDINARY: dict[str, Value] = {
    **{"size": 8, "choose": "in_turn", "shared": False, "rows": 1, "max_rounds": 10},
    **{"keep": "all", "learn": "bare", "after": 0.0, "memory": 0.5},
    **{"hint.template": "{prompt}\n\nHint: {hint}", "prompt": SelfTeacher.model_fields["prompt"].default},
    **{"zero_truncated": False, "shows": "trace", "reverse": False},
    **{"select": "on_policy", "population": "joint", "mode": "token", "before_gate": False},
    **{"coefficient": 1.0, "coefficient.over": 1.0, "prefix.length.low.over": 1.0, "over": "teacher"},
    **{"clip_low": 0.2, "clip_high": 0.2, "floor": 0.1, "temperature": "one", "token_weight": "one"},
    **{"beta": 0.5, "rest": "bucket", "correction.low": 0.0},
}
"""Values that a row leaves out, by key or by the end of one. Any other value is left out only where it is null."""

MEAN, GRPO = "group_mean scale_by_std=False", "group_mean scale_by_std=True"
DEMONSTRATION = "select=off_policy nll population=own"
SHAPED = "select=off_policy shaped_surrogate shaping=rational shaping.gamma=0.1 behavior=one"
ENTROPY = "select=response entropy temperature=rollout coefficient=0.0003 population=own"
"""LUFFY's code: 0.001 x 6 micro-batches / 22, the factor between its sum over sequences and a token mean."""
STAGE = (
    "chain=sft sft.epochs=3 sft.optimizer.lr=5e-05 sft.optimizer.schedule.kind=cosine "
    "sft.optimizer.schedule.warmup_share=0.1 sft.optimizer.schedule.final_share=0.1"
)
"""SFT of the LUFFY paper and of its re-evaluation, arXiv 2604.23747."""


def _row(source: str, group: str = "", advantage: str = "", **parts: str) -> tuple[str, dict[str, str]]:
    """The source, and the words of each part that a preset has."""
    parts = {"group": group, "advantage": advantage, **parts}
    return source, {name: words for name, words in parts.items() if words}


PUBLISHED = {
    "adaback": _row(
        "arXiv 2506.18110, two accounts; bound on the reward and clip are not known",
        "prefix=prefix prefix.dose=prompt_bisection prefix.dose.success=0.5 prefix.rows=all prefix.shared=True",
        GRPO,
        on_policy="clipped_surrogate population=own",
    ),
    "adaprefix": _row(
        "arXiv 2607.07674, accounts; first share, gain, envelope and clip are not known",
        "prefix=prefix prefix.dose=batch_root prefix.dose.target=0.5 prefix.dose.first=0.5 prefix.dose.every=10 "
        "prefix.dose.gain=0.5 prefix.dose.envelope=warmup_cosine prefix.dose.envelope.start=1.0 "
        "prefix.dose.envelope.peak=1.0 prefix.dose.envelope.end=0.0 prefix.dose.envelope.warmup=0.6 "
        "prefix.dose.envelope.decay=0.4 prefix.rows=all prefix.shared=True",
        GRPO,
        on_policy="clipped_surrogate population=own",
    ),
    "adhint_schedule": _row(
        "arXiv 2512.13095, accounts; bounds, noise, rows and clip are not known",
        "hint=prefix hint.dose=difficulty hint.dose.low=0.1 hint.dose.high=0.9 hint.dose.noise=0.1 hint.rows=4",
        GRPO,
        on_policy="clipped_surrogate before_gate=True",
        hint="select=off_policy gate.outcome=correct clipped_surrogate before_gate=True",
    ),
    "aipo": _row("arXiv 2505.24034: bounds from 2 to 10 work", advantage=MEAN, on_policy="aipo max_ratio=4.0"),
    "ampo": _row(
        "arXiv 2510.02227, authors' code; entropy 0.001 / 2.1",
        "trace=trace trace.choose=likeliest_answer trace.rows=2 trace.when.accuracy_at_most=0.0",
        MEAN,
        on_policy="clipped_surrogate dual_clip=10.0",
        off_policy=SHAPED,
        entropy=ENTROPY.replace("0.0003", "0.0005"),
    ),
    "bread": _row(
        "arXiv 2506.17211; GRPO, arXiv 2402.03300; bounds, clip and KL are not known",
        "anchor=prefix anchor.pieces=10 anchor.dose=search anchor.dose.at_least=0.25 anchor.dose.at_most=0.75 "
        "anchor.rows=all anchor.when.accuracy_at_most=0.0 anchor.keep=nearest",
        GRPO,
        on_policy="clipped_surrogate mode=sequence population=own",
        kl="kl estimator=k3 against=reference coefficient=0.001 mode=sequence population=own",
    ),
    "chord": _row(
        "arXiv 2508.11408, CHORD-phi: mu 0.1",
        "trace=trace",
        "population=on_policy group_mean scale_by_std=True",
        on_policy="clipped_surrogate coefficient=0.9",
        sft="select=off_policy nll token_weight=p_one_minus_p coefficient=0.1 population=own",
    ),
    "cispo": _row(
        "arXiv 2506.13585, eq. 4 and 5; bound 5 as later implementations",
        "filter=dynamic_sampling",
        GRPO,
        on_policy="cispo clip_low=None clip_high=4.0",
    ),
    "critique_grpo": _row(
        "arXiv 2506.03106, authors' code (critique simple_gt); no std, as its script wants; entropy 0.001 / 4.9",
        "critique=critique critique.about=each critique.wrong='The solution is incorrect, the answer is {reference}.' "
        "critique.right='The solution is correct, the answer is {reference}.' "
        r"critique.template='{prompt}\n\n{response}\n\n{feedback}' "
        "critique.rows=8 critique.when.accuracy_at_most=1.0 critique.keep=best",
        MEAN,
        on_policy="surrogate",
        refined=SHAPED,
        entropy=ENTROPY.replace("0.0003", "0.0002"),
    ),
    "dapo": _row(
        "arXiv 2503.14476, eq. 8 and section 3",
        "filter=dynamic_sampling",
        "zero_truncated=True " + GRPO,
        on_policy="clipped_surrogate clip_high=0.28",
    ),
    "dft": _row(
        "arXiv 2508.05629", dft="select=off_policy nll token_weight=probability population=own", settings=STAGE
    ),
    "dr_grpo": _row("arXiv 2503.20783, section 3.2", advantage=MEAN, on_policy="clipped_surrogate mode=constant"),
    "exgrpo": _row(
        "arXiv 2510.02245, authors' code",
        advantage=MEAN,
        replay="share=0.5 start_accuracy=0.35 choose=lowest_entropy",
        on_policy="surrogate",
        replayed=SHAPED.replace("behavior=one", "behavior=recorded"),
        entropy=ENTROPY,
    ),
    "g2rpo_a": _row(
        "arXiv 2508.13023, authors' code; KL 0.04 by its framework's default",
        "guidance=prefix guidance.dose=batch_ratio guidance.dose.first=1.0 guidance.dose.every=3 guidance.rows=2",
        GRPO,
        policy="select=response surrogate mode=sequence population=own",
        kl="select=response kl estimator=k3 against=reference coefficient=0.04 mode=sequence population=own",
    ),
    "gkd": _row(
        "arXiv 2306.13649: lambda 1, beta 0.5; top 64 of a whole vocabulary",
        advantage="none",
        distillation="divergence measure=jsd top_k=64 population=own",
    ),
    "gspo": _row(
        "arXiv 2507.18071, eq. 5 to 7: 3e-4, 4e-4",
        advantage=GRPO,
        on_policy="sequence_surrogate clip_low=0.0003 clip_high=0.0004 mode=sequence",
    ),
    "guide": _row(
        "arXiv 2506.13923 v2, authors' code; gamma there is a quantile",
        "hint=hint hint.dose=0.5 hint.rows=8 hint.when.accuracy_at_most=0.0 filter=dynamic_sampling",
        GRPO,
        on_policy="clipped_surrogate mode=sequence",
        hinted="select=off_policy shaped_surrogate shaping=rational shaping.gamma=1.0 behavior=recorded mode=sequence",
    ),
    "hdpo": _row(
        "arXiv 2603.23871, accounts: JSD over 64 tokens; lambda, rows with the answer and the clip are not known",
        "answer=critique answer.about=all answer.wrong='Answer: {reference}.' "
        "answer.template='{prompt}\\n\\n{feedback}' answer.rows=8 answer.when.accuracy_at_most=0.0 answer.keep=beside",
        GRPO,
        on_policy="clipped_surrogate population=own",
        distillation="select=off_policy gate.taught=True divergence measure=jsd top_k=64 coefficient=0.1 "
        "population=own",
        self="self shows=start weights=current",
    ),
    "hpt": _row(
        "arXiv 2509.04419: gamma 0, SFT 1.0 (7B)",
        "trace=trace trace.when.accuracy_at_most=0.0",
        "population=on_policy group_mean scale_by_std=False",
        on_policy="gate.group_accuracy_above=0.0 surrogate before_gate=True",
        sft=DEMONSTRATION,
        entropy=ENTROPY,
    ),
    "kdrl": _row(
        "arXiv 2506.02208, sections 3 and 4, with annealing",
        advantage=GRPO,
        on_policy="clipped_surrogate",
        kl="kl estimator=k2 against=teacher coefficient=linear coefficient.start=0.005 coefficient.end=0.001 "
        "population=own",
    ),
    "lte": _row(
        "arXiv 2510.26109; gamma, clip and words are not known",
        "critique=critique critique.about=all critique.wrong='Wrong answers: {answers}.' "
        r"critique.truncated='Think concisely.' critique.template='{prompt}\n\n{feedback}' "
        "critique.rows=8 critique.when.accuracy_at_most=0.0 critique.keep=all_correct",
        GRPO,
        on_policy="clipped_surrogate population=own",
        hinted=SHAPED.replace("behavior=one", "behavior=recorded population=own"),
    ),
    "luffy": _row(
        "arXiv 2504.14945 v5, eq. 4 to 6, appendix E.1",
        "trace=trace",
        MEAN,
        on_policy="surrogate",
        off_policy=SHAPED,
        entropy=ENTROPY,
    ),
    "luffy_no_shaping": _row(
        "arXiv 2504.14945, section 3.2 and Table 4",
        "trace=trace",
        MEAN,
        on_policy="surrogate",
        off_policy=SHAPED.replace("shaping=rational shaping.gamma=0.1", "shaping=identity"),
        entropy=ENTROPY,
    ),
    "luffy_prefix": _row(
        "arXiv 2504.14945, authors' code (prefix_strategy: random, from 0 to 1)",
        "trace=prefix trace.dose=uniform trace.dose.low=0.0 trace.dose.high=1.0",
        MEAN,
        on_policy="surrogate",
        off_policy=SHAPED,
        entropy=ENTROPY,
    ),
    "mfc": _row(
        "arXiv 2609.13997, accounts; clip range is not known",
        "hint=hint hint.dose=prompt_frontier hint.dose.success=0.5 hint.rows=all hint.shared=True hint.learn=shown",
        GRPO,
        on_policy="clipped_surrogate clip_high=0.28 population=own",
        kl="kl estimator=k3 against=reference coefficient=0.001 population=own",
    ),
    "mopd": _row(
        "arXiv 2601.02780 and 2606.30406; alpha is not known",
        advantage=GRPO,
        on_policy="surrogate population=all",
        distillation="gate.taught=True distillation population=all",
    ),
    "on_policy": _row(
        "arXiv 2402.03300, 2503.20783; train_on_policy.sh",
        advantage=MEAN,
        on_policy="clipped_surrogate",
        entropy=ENTROPY,
    ),
    "opd": _row(
        "Thinking Machines Lab 2025; GKD, arXiv 2306.13649",
        advantage="none",
        distillation="distillation population=own",
    ),
    "opd_rl": _row(
        "Thinking Machines Lab 2025; arXiv 2503.20783; 0.1 is not known",
        advantage=MEAN,
        on_policy="surrogate",
        distillation="distillation coefficient=0.1 population=own",
    ),
    "opd_topk": _row(
        "verl, forward_kl_topk; GKD, arXiv 2306.13649",
        advantage="none",
        distillation="divergence measure=forward_kl top_k=32 rest=ignored population=own",
    ),
    "opo": _row("arXiv 2505.23585", advantage="length_weighted", on_policy="surrogate mode=constant"),
    "opsd": _row(
        "arXiv 2601.18734, by the sampled token",
        advantage="none",
        distillation="distillation population=own",
        self="self weights=start",
    ),
    "opsd_jsd": _row(
        "arXiv 2601.18734, beta 0.5, fixed_teacher; top 64 of a whole vocabulary",
        advantage="none",
        distillation="divergence measure=jsd top_k=64 population=own",
        self="self weights=start",
    ),
    "pope": _row(
        "arXiv 2601.18779; levels and clip are not known",
        "hint=hint hint.dose=prompt_levels hint.dose.shares=0.0625,0.125,0.1875,0.25 hint.dose.more_below=0.125 "
        "hint.rows=all hint.when.share=0.5 hint.learn=shown",
        GRPO,
        on_policy="clipped_surrogate population=own",
    ),
    "ppo": _row(
        "arXiv 1707.06347, eq. 7; 1506.02438; 2203.02155",
        advantage="gae gamma=1.0 lam=0.95 whiten=True",
        on_policy="clipped_surrogate",
        settings="rl.critic.optimizer.lr=1e-05 rl.critic.value_clip=0.2",
    ),
    "prefix_rft": _row(
        "arXiv 2507.01679",
        "prefix=prefix prefix.dose=uniform prefix.dose.low=cosine prefix.dose.low.start=0.95 prefix.dose.low.end=0.05 "
        "prefix.dose.low.over=1.0 prefix.dose.high=0.95",
        MEAN,
        on_policy="clipped_surrogate dual_clip=3.0 mode=constant",
        prefix="select=off_policy surrogate top_entropy_share=0.2 mode=constant",
    ),
    "psft": _row(
        "arXiv 2508.17784, authors' script: 64 traces, 8 a step",
        psft="select=off_policy clipped_surrogate clip_high=0.28 population=own",
        settings=STAGE.replace("epochs=3", "epochs=3 sft.steps_per_phase=8"),
    ),
    "questa": _row(
        "arXiv 2507.13266: a half, then a quarter; 100 and 1900 steps",
        "hint=hint hint.dose=linear hint.dose.start=0.5 hint.dose.end=0.25 hint.dose.over=0.1 hint.dose.levels=2 "
        "hint.rows=all hint.learn=shown filter=dynamic_sampling",
        GRPO,
        on_policy="clipped_surrogate population=own",
    ),
    "reinforce_pp": _row(
        "arXiv 2501.03262, -baseline; KL of the script for long reasoning",
        advantage="global_batch group_baseline=True",
        on_policy="clipped_surrogate",
        kl="kl estimator=k2 against=reference coefficient=1e-05 population=own",
    ),
    "relift": _row(
        "arXiv 2506.07527, present scripts; entropy of the paper",
        advantage=MEAN,
        on_policy="clipped_surrogate clip_high=0.28 dual_clip=3.0",
        interleaved_sft="buffer_size=64",
        sft=DEMONSTRATION,
        sft_entropy="select=off_policy entropy coefficient=0.0001 population=own",
    ),
    "rl_plus": _row(
        "arXiv 2508.00222, authors' script",
        "trace=trace",
        MEAN,
        on_policy="surrogate",
        off_policy="select=off_policy multiple_importance exploration_exponent=0.5",
        entropy=ENTROPY,
    ),
    "rl_sft_loss": _row(
        "LUFFY paper, Table 1, train_rl_sft_loss.sh: 1.0",
        "trace=trace",
        "population=on_policy group_mean scale_by_std=False",
        on_policy="surrogate",
        sft=DEMONSTRATION,
        entropy=ENTROPY,
    ),
    "rlep": _row(
        "arXiv 2507.07451, authors' code; a group of 16 + 2 there",
        "trace=trace",
        GRPO,
        policy="select=response clipped_surrogate clip_high=0.28 dual_clip=10.0 population=own",
    ),
    "rloo": _row("arXiv 2402.14740, section 3.3", advantage="leave_one_out", on_policy="surrogate mode=constant"),
    "rlrt": _row(
        "arXiv 2605.10781: lambda 0.5; bound 1 from base models",
        advantage=GRPO,
        on_policy="gate.taught=False clipped_surrogate",
        right="gate.taught=True clipped_surrogate coefficient=0.5",
        evidence="gate.taught=True clipped_surrogate evidence.clip=1.0 evidence.reverse=True coefficient=0.5",
        self="rows.outcome=correct self shows=peer weights=current",
    ),
    "rlsd": _row(
        "arXiv 2604.03128; lambda 0.5 to 0, there over 50 steps",
        advantage=GRPO,
        on_policy="clipped_surrogate coefficient=linear coefficient.start=0.5 coefficient.end=1.0 coefficient.over=0.5",
        evidence="clipped_surrogate evidence.clip=0.2 coefficient=linear coefficient.start=0.5 coefficient.end=0.0 "
        "coefficient.over=0.5",
        self="self weights=current",
    ),
    "scaf_grpo": _row(
        "arXiv 2510.19807 v2, eq. 4, authors' script; dual clip: verl",
        "hint=hint hint.dose=levels hint.dose.shares=0.2,0.4,0.6,0.8 hint.rows=4 hint.when.accuracy_at_most=0.0 "
        "hint.when.after=0.15 hint.keep=first_correct hint.learn=shown",
        GRPO,
        on_policy="clipped_surrogate dual_clip=3.0 population=own",
    ),
    "sdft": _row(
        "arXiv 2601.19897, authors' code; top 64 of a whole vocabulary",
        advantage="none",
        distillation="divergence measure=forward_kl top_k=64 mode=sequence population=own",
        self="self weights=start follows.refresh_every=1 follows.mixup=0.01",
    ),
    "sdpg": _row(
        "arXiv 2606.04036, authors' code (urkl); top 64 of a whole vocabulary",
        advantage=GRPO,
        on_policy="clipped_surrogate clip_high=0.28 dual_clip=10.0",
        distillation="divergence measure=reverse_kl top_k=64 coefficient=0.001 population=own",
        kl="kl estimator=k2 against=reference coefficient=0.001 population=own",
        self="self weights=current",
    ),
    "sdpo": _row(
        "arXiv 2601.20802, authors' code for verifiable rewards",
        advantage="none",
        distillation="gate.taught=True divergence measure=jsd top_k=100 correction.level=token correction=truncate "
        "correction.high=2.0 population=own",
        self="self shows=peer weights=start follows.refresh_every=1 follows.mixup=0.05",
    ),
    "seele": _row(
        "arXiv 2509.06923, accounts: 4 rounds of 8, 0.001 SFT and KL; bounds of the fit and clip are not known",
        "size=32 hint=prefix hint.dose=fit hint.dose.target=0.5 hint.dose.rounds=4 hint.dose.first=1.0 hint.rows=all "
        "hint.shared=True",
        GRPO,
        on_policy="clipped_surrogate population=own",
        hint="select=off_policy nll coefficient=0.001 population=own",
        kl="kl estimator=k3 against=reference coefficient=0.001 population=own",
    ),
    "sft": _row("arXiv 2604.23747 and the LUFFY paper", sft=DEMONSTRATION, settings=STAGE),
    "srft": _row(
        "arXiv 2506.19767: w_SFT = 0.5 e^-H, w_RL = 0.1 e^H",
        "trace=trace",
        GRPO,
        sft="select=off_policy nll token_weight=exp_minus_entropy coefficient=0.5 mode=constant population=all",
        off_policy="select=off_policy shaped_surrogate shaping=identity behavior=one mode=constant population=all",
        right="gate.outcome=correct nll temperature=rollout token_weight=exp_entropy coefficient=0.1 mode=constant "
        "population=all",
        wrong="gate.outcome=wrong nll temperature=rollout coefficient=-1.0 mode=constant population=all",
    ),
    "srpo": _row(
        "arXiv 2604.02288: beta 1; the rest as sdpo, arXiv 2601.20802",
        advantage=GRPO,
        on_policy="gate.taught=False clipped_surrogate population=all",
        distillation="gate.taught=True divergence measure=jsd top_k=100 correction.level=token "
        "correction=truncate correction.high=2.0 weigh.teacher_entropy=1.0 population=all",
        self="rows.outcome=wrong self shows=peer weights=start follows.refresh_every=1 follows.mixup=0.05",
    ),
    "stephint": _row(
        "arXiv 2507.02841; levels, rows and clip are not known",
        "hint=prefix hint.dose=even hint.dose.low=0.2 hint.dose.high=0.8 hint.rows=4",
        GRPO,
        on_policy="clipped_surrogate before_gate=True",
        hint="select=off_policy gate.outcome=correct clipped_surrogate before_gate=True",
    ),
    "superrl": _row(
        "arXiv 2506.01096, later form",
        "trace=trace",
        "population=on_policy group_mean scale_by_std=True",
        on_policy="gate.group_accuracy_above=0.0 clipped_surrogate before_gate=True",
        sft="select=off_policy gate.group_accuracy_at_most=0.0 nll population=own before_gate=True",
    ),
    "tgopd": _row(
        "arXiv 2609.02998, accounts: two of three probes, clip 0.2, groups of 4; beta is not known",
        "size=4",
        MEAN,
        on_policy="gate.taught=False clipped_surrogate population=all",
        distillation="gate.taught=True distillation population=all",
        settings="difficulty.teacher=teacher difficulty.num_samples=3 difficulty.max_pass_rate=1.0 "
        "rl.teachers.teacher.kind=model rl.teachers.teacher.rows.pass_rate_at_least=0.66",
    ),
    "trapo": _row(
        "arXiv 2512.17636, authors' code; 0.7 of the paper; entropy 0.001 / 2.7",
        "prefix=prefix prefix.dose=ladder "
        "prefix.dose.rungs.0.rows=2 prefix.dose.rungs.0.share=0.25 prefix.dose.rungs.0.below=0.5 "
        "prefix.dose.rungs.1.share=0.5 prefix.dose.rungs.1.below=0.7 "
        "prefix.dose.rungs.2.share=1.0 prefix.dose.rungs.2.below=0.9 prefix.rows=4",
        MEAN,
        on_policy="surrogate population=all",
        prefix="select=off_policy nll temperature=rollout token_weight=trust_region population=all",
        entropy=ENTROPY.replace("0.0003", "0.00037"),
    ),
    "trsft": _row(
        "arXiv 2512.17636: floor 0.1",
        trsft="select=off_policy nll token_weight=trust_region population=own",
        settings=STAGE,
    ),
    "uft": _row(
        "arXiv 2505.16984: 5 pieces, beta 0.001; k3 of the authors' framework",
        "hint=prefix hint.dose=binomial hint.dose.pieces=5 hint.dose.probability=cosine "
        "hint.dose.probability.start=0.95 hint.dose.probability.end=0.0 hint.dose.probability.over=0.6 "
        "hint.rows=all hint.shared=True",
        GRPO,
        on_policy="clipped_surrogate",
        hint="select=off_policy nll coefficient=0.001 population=own",
        kl="kl estimator=k3 against=reference coefficient=0.001 population=own",
    ),
    "vold": _row(
        "arXiv 2510.23497; beta is not known: KDRL's",
        advantage=GRPO,
        on_policy="clipped_surrogate population=all",
        kl="gate.outcome=wrong kl estimator=k2 against=teacher coefficient=0.005 population=all",
    ),
}


def flat(value: Value, *path: str) -> Iterator[tuple[tuple[str, ...], Value]]:
    """The leaves below a value; a list of plain values is one."""
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        value = {str(index): part for index, part in enumerate(value)}
    if not isinstance(value, dict):
        yield path, value
    else:
        for key, part in value.items():
            yield from flat(part, *path, key)


def words(part: Value) -> str:
    """What a part of a preset has beside `ORDINARY`."""
    found = []
    for path, value in flat(part):
        if path[-1] == "name" or (path[-1] == "kind" and value == "constant"):
            continue
        key = ".".join(each for each in path if each not in ("loss", "normaliser", "starts", "show", "kind", "value"))
        if value != ORDINARY.get(key, ORDINARY.get(key.rpartition(".")[2])):
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            text = repr(text) if " " in text or "\n" in text else text
            found.append(f"{key}={text}" if key else text)
    return " ".join(found)


def parts_of(name: str) -> dict[str, str]:
    """The words of each part of a preset, over an experiment that sets nothing of it."""
    needed = ["sft.batch_size=8"] if name in SUPERVISED else ["chain=rl"]
    resolved = resolve_experiment(BASE, [*needed, f"method={name}", *teacher_overrides(name)])
    rl, sft = resolved.config.rl, resolved.config.sft
    objective = (resolved.config.objective or sft.objective).model_dump(mode="json")
    interleaved = objective.get("interleaved_sft") or {"terms": []}
    terms = {term["name"]: term for term in [*objective.pop("terms"), *interleaved.pop("terms")]}
    parts: dict[str, Value] = {**objective, **terms}
    for name, teacher in rl.teachers.items() if rl is not None else ():
        if isinstance(teacher, SelfTeacher):
            parts[name] = teacher.model_dump(mode="json", exclude_none=True)
    settings = {}
    for path, value in flat(resolved.given):
        by_preset = resolved.origins[path].startswith(f"{METHODS}/")
        if by_preset and path[0] != "stages" and not {"objective", "self"} & {*path}:
            settings[".".join(path)] = value
    parts["settings"] = settings
    return {part: found for part, value in parts.items() if value and (found := words(value))}


def test_every_preset_is_in_the_table():
    assert list(PUBLISHED) == sorted(available_presets("methods"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_values_of_its_source(name):
    source, parts = PUBLISHED[name]
    assert parts_of(name) == parts
    text = (METHODS / f"{name}.yaml").read_text(encoding="utf-8")
    teachers = yaml.safe_load(text).get("rl", {}).get("teachers", {})
    assert ("self" in parts) == ("self" in teachers), "the user gives the others"
    assert all(number in text for number in re.findall(r"\d{4}\.\d{5}", source)) and source
