"""What every method's updates are made of: each preset from the plan of a step to the rows of each rank.

The parts are those of a run (prompts, replay, prefixes, dynamic sampling, journal, trainer); only the engine follows a
script, and in place of a model stands a record of what each rank would have learned.
"""

import dataclasses
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from reference.taught_presets import SUPERVISED, teacher_overrides
from reference.token_cases import tokens_of
from support.patience import PATIENCE_S
from synthetic.settings import rl_settings

from luffy.config import available_presets
from luffy.config.group import DynamicSampling
from luffy.config.settings import RLSettings
from luffy.grading.pool import GraderPool
from luffy.objectives.losses import token_loss
from luffy.objectives.objective import token_weights
from luffy.objectives.schedules import objective_at
from luffy.rl.groups import GroupCollector
from luffy.rl.loop import StepRunner
from luffy.rl.retries import RetryPrompts
from luffy.rl.rows import Demonstration, RolloutTask
from luffy.rl.trace_choice import TraceChoice
from luffy.rl.trace_starts import Anchors, HintedPrompts
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, limit
from luffy.tracking.journal import RolloutJournal
from luffy.training.batching import Shard, collate, has_demonstration, has_hinted_row, has_prefix_row, row_advantages
from luffy.training.learner import Trainer, TrainerRank
from luffy.types import SAMPLED, FinishReason, Group, Hint, Message, Source, TrainBatch, Trajectory

ROOT = Path(__file__).resolve().parents[3]
METHODS = [name for name in available_presets("methods") if name not in SUPERVISED]
"""Every preset with an RL step; the others learn from traces alone."""
RIGHT, WRONG, STOP = 1, 2, 3
BARE_LOGP, HINTED_LOGP = -0.5, -0.25
"""Of every token that the script samples."""
PROMPTS, STEPS = 12, 4
UPDATES, RANKS = (1, 2, 4), (1, 2)
CUTS = tuple(itertools.product(UPDATES, RANKS))
SMALL = {"relift": ("objective.interleaved_sft.buffer_size=3",), "exgrpo": ("objective.replay.start_accuracy=0.05",)}
KINDS: dict[str, Callable[[Group], bool]] = {
    "replayed": lambda group: group.is_replayed,
    "prefixed": has_prefix_row,
    "hinted": has_hinted_row,
    "demonstrated": has_demonstration,
}


class Script:
    """An engine whose response depends on the request alone: of every four prompts one is never solved, one always.

    A hint, or some tokens of a trace to continue, make all of them equally hard. A share of the responses ends as
    episodes do whose environment failed. A request with too few tokens gets the first of them.
    """

    def __init__(self, version: int, failing: float = 0.0) -> None:
        self.version = version
        self._failing = failing
        self.seeds: list[int] = []
        """Of all requests so far."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.seeds += [request.seed for request in requests]
        return [self._response(request, limit(request, params)) for request in requests]

    def close(self) -> None: ...

    def _response(self, request: RolloutRequest, most: int) -> Completion:
        rng = random.Random(request.seed)
        is_hinted = request.prompt_ids[1:] != ()
        is_helped = is_hinted or len(request.prefix_ids) > 2
        is_right = rng.random() < (0.4 if is_helped else (0.0, 0.3, 0.7, 1.0)[request.prompt_ids[0] % 4])
        ids = (*[9] * rng.randrange(6), RIGHT if is_right else WRONG, STOP)
        end = FinishReason.STOP if len(ids) <= most else FinishReason.LENGTH
        reason, ids = FinishReason.ENVIRONMENT_ERROR if rng.random() < self._failing else end, ids[:most]
        return Completion(
            ids, (HINTED_LOGP if is_hinted else BARE_LOGP,) * len(ids), reason, (self.version,) * len(ids)
        )


def _tasks() -> list[RolloutTask]:
    """48 prompts: of every six, one without a trace, one with a trace of one token, one with two traces."""
    return [
        RolloutTask(
            f"p{i}", (10 + i,), "7", tuple(_trace(i + j) for j in range((0, 1, 2, 1, 1, 1)[i % 6])),
            messages=(Message("user", str(10 + i)),),
        )
        for i in range(48)
    ]  # fmt: skip


def _encode(messages: Sequence[Message]) -> tuple[int, ...]:
    """The prompt's token, and after it one for each word that it is shown."""
    number, *rest = messages[-1].content.split()
    return (int(number), *[99] * len(rest))


def _trace(index: int) -> Demonstration:
    ids = (STOP,) if index % 6 == 3 else (*[20] * (index % 11), RIGHT, STOP)
    return Demonstration("step 1\nstep 2\nstep 3\nstep 4\n" + _decode(ids), ids, (-0.1,) * len(ids))


def _decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def _spelt(ids: Sequence[int]) -> str:
    """A character for each token of a trace."""
    return "".join({RIGHT: "7", STOP: "."}.get(token, "-") for token in ids)


def settings_of(method: str, *more: str, steps: int = STEPS) -> RLSettings:
    overrides = [
        "chain=rl", f"method={method}", f"rl.prompts_per_step={PROMPTS}", f"rl.steps={steps}", *SMALL.get(method, ()),
        *teacher_overrides(method), *more,
    ]  # fmt: skip
    return rl_settings(*overrides)


Sent = list[tuple[Callable[..., Any], list[Shard]]]


@dataclass(frozen=True)
class RecordedRanks:
    """Stands for the trainer's ranks: keeps the shards that they are sent, and the state for their checkpoints."""

    sent: Sent
    num_ranks: int
    saved: list[Mapping[str, object]] = field(default_factory=list)

    def call(self, method: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if method in (TrainerRank.entropies, TrainerRank.mean_probabilities):
            return [[float(len(row.response_ids)) for row in rows] for (rows,) in arguments]
        if method is TrainerRank.follow:
            return [None for _ in arguments]
        if method is TrainerRank.save:
            self.saved.append(arguments[0][1])
            return [None for _ in arguments]
        if method is TrainerRank.restore:
            return [self.saved[step - 1] for (step,) in arguments]
        self.sent.append((method, [shard for shard, _ in arguments]))
        return [{} for _ in arguments]


class ScriptedCluster:
    """A cluster whose engine is the script and whose ranks are a record."""

    def __init__(self, trainer: Trainer, failing: float) -> None:
        self.trainer = trainer
        self.engine = Script(0, failing)

    def publish(self, version: int) -> None:
        self.engine.version = version

    def metrics(self) -> dict[str, float]:
        return {}

    def __enter__(self) -> "ScriptedCluster":
        return self

    def __exit__(self, *_: object) -> None: ...


def _learned(settings: RLSettings, groups: Sequence[Group], step: int, num_updates: int, num_ranks: int) -> list[Shard]:
    """What each rank would learn of a step's groups."""
    rl = settings.rl.model_copy(update={"prompts_per_update": PROMPTS // num_updates})
    sent: Sent = []
    Trainer(settings.model_copy(update={"rl": rl}), RecordedRanks(sent, num_ranks)).learn(groups, step)
    return sent[0][1]


@dataclass(frozen=True)
class Learned:
    """A row and what its rank knows of its group."""

    trajectory: Trajectory
    group: int
    advantage: float
    accuracy: float


def _learned_by(shard: Shard) -> list[list[Learned]]:
    rows = [
        Learned(row, group, advantage, shard.accuracies[group])
        for row, group, advantage in zip(shard.rows, shard.groups, shard.advantages, strict=True)
    ]
    return [[rows[row] for row in update] for update in shard.updates]


@dataclass(frozen=True)
class Step:
    """One RL step as it was composed."""

    groups: list[Group]
    kept: list[Group]
    metrics: dict[str, float]
    shards: dict[tuple[int, int], list[Shard]]
    """By updates and ranks: what each rank learns."""

    def updates(self, num_updates: int, num_ranks: int) -> list[list[Learned]]:
        """The rows that all ranks together learn in each update."""
        parts = [_learned_by(shard) for shard in self.shards[num_updates, num_ranks]]
        return [[row for part in update for row in part] for update in zip(*parts, strict=True)]


@dataclass(frozen=True)
class Run:
    """A few steps of one method."""

    settings: RLSettings
    steps: list[Step]
    sft_steps: list[list[Shard]]
    """What each rank learns in the SFT steps between them."""
    state: Mapping[str, object]
    """What the checkpoint of the last step holds for later steps."""
    seeds: list[int]
    """Of all responses that were requested."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    with GraderPool(1, PATIENCE_S) as grader:
        yield cache(lambda method: _run(grader, tmp_path_factory.mktemp("journal"), method))


def runner_of(
    settings: RLSettings,
    grader: GraderPool,
    journal: RolloutJournal,
    ranks: RecordedRanks,
    failing: float = 0.0,
    tasks: Sequence[RolloutTask] | None = None,
) -> tuple[StepRunner, Script]:
    """The loop of a run, of these tasks or those above, and its engine."""
    group, steps = settings.objective.group, settings.rl.steps
    hints = None if group.hint is None else HintedPrompts(group.hint, _encode, settings.seed, steps)
    retries = None if group.retry is None else RetryPrompts.fitting(group.retry, _encode, _decode, _tasks(), 64, None)
    anchors = None if group.anchor is None else Anchors(group.anchor, _decode, settings.seed)
    params, partial = SamplingParams(1.0, 64, (STOP,)), settings.rl.partial_rollout_tokens
    collector = GroupCollector(
        grader, _decode, params, group, settings.seed, steps, hints=hints, retries=retries, anchors=anchors,
        step_tokens=partial,
    )  # fmt: skip
    cluster = ScriptedCluster(Trainer(settings, ranks), failing)
    choice = None if group.choose == "in_turn" else TraceChoice(_spelt, lambda text: (RIGHT,), 100)
    runner = StepRunner(settings, cluster, tasks or _tasks(), collector, journal, choice=choice)
    return runner, cluster.engine


def _run(
    grader: GraderPool, folder: Path, method: str, *overrides: str, num_steps: int = STEPS, failing: float = 0.0
) -> Run:
    settings, sent, journal = settings_of(method, *overrides, steps=num_steps), Sent(), RolloutJournal(folder)
    ranks = RecordedRanks(sent, 2)
    runner, engine = runner_of(settings, grader, journal, ranks, failing)
    with runner:
        outcomes = [runner.run(step) for step in range(1, num_steps + 1)]
        runner.save(num_steps)
    assert [method for method, _ in sent].count(TrainerRank.learn) == num_steps, "every step learns from some groups"
    steps = [
        Step(
            journal.read(step) or [],
            list(outcome.groups),
            outcome.metrics,
            {case: _learned(settings, outcome.groups, step, *case) for case in CUTS},
        )
        for step, outcome in enumerate(outcomes, start=1)
    ]
    sft_steps = [shards for method, shards in sent if method is TrainerRank.sft_step]
    return Run(settings, steps, sft_steps, ranks.saved[-1], engine.seeds)


CASES = pytest.mark.parametrize("method", METHODS)


@CASES
def test_updates_differ_by_at_most_one_group_of_each_kind(method: str, run: Callable[[str], Run]) -> None:
    for step, num_updates in itertools.product(run(method).steps, UPDATES):
        dealt = [{row.group for row in rows} for rows in step.updates(num_updates, 1)]
        assert len(dealt) == min(num_updates, len(step.kept))
        for is_kind in (lambda group: True, *KINDS.values()):
            counts = [sum(is_kind(step.kept[group]) for group in groups) for groups in dealt]
            assert max(counts) - min(counts) <= 1


@CASES
def test_every_row_is_in_one_update_and_the_same_one_on_any_number_of_ranks(method, run):
    for step, num_updates in itertools.product(run(method).steps, UPDATES):
        alone, shared = (step.updates(num_updates, num_ranks) for num_ranks in RANKS)
        rows = [row for group in step.kept for row in group.trajectories]
        assert Counter(row.trajectory for update in alone for row in update) == Counter(rows)
        assert list(map(Counter, alone)) == list(map(Counter, shared))
        assert all(rows for shard in step.shards[num_updates, 2] for rows in shard.updates), "ranks must keep step"


@CASES
def test_every_group_and_every_update_holds_a_sampled_token(method: str, run: Callable[[str], Run]) -> None:
    for step, num_updates in itertools.product(run(method).steps, UPDATES):
        assert all(any(map(_is_sampled, group.trajectories)) for group in step.groups)
        for rows in step.updates(num_updates, 1):
            assert any(_is_sampled(row.trajectory) for row in rows)


@CASES
def test_no_two_responses_of_a_run_have_the_same_seed(method: str, run: Callable[[str], Run]) -> None:
    seeds = run(method).seeds
    assert len(set(seeds)) == len(seeds) >= PROMPTS * STEPS


def test_exgrpo_replays_the_success_of_lowest_entropy(run: Callable[[str], Run]) -> None:
    """The record of the trainer's ranks gives a response of n tokens the entropy n."""
    steps, kinds = run("exgrpo").steps, Counter[bool]()
    for number, step in enumerate(steps):
        for group in filter(KINDS["replayed"], step.groups):
            lengths = {
                len(row.response_ids)
                for earlier in steps[:number]
                for same in earlier.groups
                for row in same.rollouts
                if same.uid == group.uid and row.is_correct
            }
            (replayed,) = [row for row in group.trajectories if Source.REPLAY in row.source]
            assert len(replayed.response_ids) == min(lengths)
            kinds[len(lengths) > 1] += 1
    assert kinds[True], "else there was nothing to choose from"


@CASES
def test_the_state_for_later_steps_is_what_a_checkpoint_can_hold(method: str, run: Callable[[str], Run]) -> None:
    state = run(method).state
    assert json.loads(json.dumps(state)) == state


def test_the_speed_of_training_counts_the_rows_trained_on(run: Callable[[str], Run]) -> None:
    """Of a step with dynamic sampling, which drops groups."""
    for step in run("dapo").steps:
        seconds = step.metrics["perf/step_s"] - step.metrics["perf/trainer_idle_s"]
        trained, sampled = (
            sum(row.num_tokens for group in groups for row in group.trajectories) for groups in (step.kept, step.groups)
        )
        assert step.metrics["perf/train_tokens_per_s"] * seconds == pytest.approx(trained)
        assert step.metrics["perf/tokens_per_s"] * step.metrics["perf/step_s"] == pytest.approx(sampled)
        assert trained < sampled


def _is_sampled(row: Trajectory) -> bool:
    return not SAMPLED.isdisjoint(row.source)


@CASES
def test_the_steps_above_have_what_makes_their_method(method: str, run: Callable[[str], Run]) -> None:
    """Else nothing would be tested: replay that has begun, hints, demonstrations, rounds, failed prompts."""
    found = run(method)
    objective, groups = found.settings.objective, [group for step in found.steps for group in step.groups]
    group = objective.group
    expected = {
        "replayed": objective.replay is not None,
        "prefixed": group.prefix is not None or group.anchor is not None,
        "hinted": group.hint is not None or group.retry is not None,
        "demonstrated": group.off_policy > 0 and group.prefix is None,
    }
    assert {kind: any(map(is_kind, groups)) for kind, is_kind in KINDS.items()} == expected
    if objective.replay is not None:
        assert sum(group.is_replayed for group in found.steps[-1].groups) == objective.replay.share * PROMPTS
    if isinstance(group.filter, DynamicSampling):
        assert any(len(step.groups) > PROMPTS for step in found.steps)
    assert bool(found.sft_steps) == (objective.interleaved_sft is not None)
    assert all(rows for shards in found.sft_steps for shard in shards for rows in shard.updates)


@pytest.mark.parametrize("method", ["luffy", "dapo", "exgrpo", "prefix_rft", "relift"])
@pytest.mark.parametrize("failing", [0.2, 0.9])
def test_rows_whose_environment_failed_are_in_no_update_and_in_no_baseline(method, failing, tmp_path):
    with GraderPool(1, PATIENCE_S) as grader:
        found = _run(grader, tmp_path, method, failing=failing)
    config, lost = found.settings.objective.advantage, 0
    for step, num_updates in itertools.product(found.steps, UPDATES):
        assert all(len(g.trajectories) + len(g.failed) >= found.settings.objective.group.size for g in step.groups)
        rows = [row for update in step.updates(num_updates, 2) for row in update]
        assert Counter(row.trajectory for row in rows) == Counter(r for g in step.kept for r in g.trajectories)
        assert not any(row.trajectory.has_failed for row in rows)
        for index, group in enumerate(step.kept):
            assert group.rollouts or not group.failed_rollouts, "nothing is known of the prompt"
            alone = row_advantages([Group(group.uid, group.trajectories)], config).tolist()
            advantages = Counter((row.trajectory, row.advantage) for row in rows if row.group == index)
            assert advantages == Counter(zip(group.trajectories, alone, strict=True))
        assert all(row.has_failed for group in step.groups for row in group.failed)
        lost += sum(not group.is_learnable for group in step.groups)
    assert any(group.failed for step in found.steps for group in step.kept)
    assert lost or failing < 0.5


def test_guidance_gives_traces_where_earlier_steps_failed(tmp_path: Path) -> None:
    """Twelve steps are three epochs: every prompt is judged by the one or two groups that it had before."""
    guidance = "objective.group.guidance={pass_rate_at_most: 0.3, memory: 0.5}"
    with GraderPool(1, PATIENCE_S) as grader:
        found = _run(grader, tmp_path, "luffy", guidance, num_steps=12)
    has_trace = {task.uid: bool(task.demonstrations) for task in _tasks()}
    rates: dict[str, float] = {}
    seen = Counter()
    for step in found.steps:
        for group in step.groups:
            guided = has_trace[group.uid] and rates.get(group.uid, 0.0) <= 0.3
            assert has_demonstration(group) == guided
            assert len(group.trajectories) == found.settings.objective.group.size, "others are rolled out in full"
            seen[guided, group.uid in rates] += 1
        for group in step.groups:
            before = rates.get(group.uid, group.accuracy)
            rates[group.uid] = 0.5 * before + 0.5 * group.accuracy
    assert seen[True, True] and seen[False, True]


HAS_STEPS = {task.uid: bool(task.demonstrations) for task in _tasks()}


def test_guide_replaces_failed_groups_by_rows_that_are_learned_without_their_hint(run: Callable[[str], Run]) -> None:
    found = [group for step in run("guide").steps for group in step.groups]
    assert any(group.hinted for group in found)
    for group in found:
        fails = not any(row.is_correct for row in group.rollouts)
        assert len(group.rollouts) == len(group.trajectories) == 8
        assert bool(group.hinted) == (fails and HAS_STEPS[group.uid])
        for row in group.hinted:
            assert row in group.trajectories, "all eight take the places of the bare ones"
            assert row.hint == Hint(1, "step 1\nstep 2")
            assert row.prompt_ids == (10 + int(group.uid[1:]),), "learned under the bare prompt"
            assert set(row.source) == {Source.HINTED} and row.is_off_policy
            assert set(row.logp_behavior) == {HINTED_LOGP}, "the ratio's denominator is the hinted probability"


def test_the_ratio_of_a_hinted_row_is_to_the_policy_with_the_hint(run: Callable[[str], Run]) -> None:
    """From the composed rows to the loss: at log p = log 0.5 the hinted token's ratio is 0.5 / e^-0.25."""
    found = run("guide")
    row = next(row for step in found.steps for group in step.groups for row in group.hinted)
    batch = collate([row], torch.ones(1), pad_id=0)
    logp_BT = torch.full(batch.logp_behavior_BT.shape, math.log(0.5))
    (term,) = [term for term in found.settings.objective.terms if term.select == "off_policy"]
    loss_BT = token_loss(term.loss, tokens_of(batch, logp_BT))[batch.response_mask_BT]
    rho = 0.5 / math.exp(HINTED_LOGP)
    assert batch.is_off_policy_BT[batch.response_mask_BT].all()
    assert loss_BT.tolist() == pytest.approx([-rho / (rho + 1)] * len(row.response_ids))


def test_scaf_grpo_keeps_the_correct_row_of_the_lowest_level_and_its_hint(run: Callable[[str], Run]) -> None:
    found = [group for step in run("scaf_grpo").steps for group in step.groups]
    kept = 0
    for group in found:
        fails = not any(row.is_correct for row in group.rollouts)
        hinted = sorted(group.hinted, key=lambda row: row.hint.level if row.hint else 0)
        assert len(hinted) == (4 if fails and HAS_STEPS[group.uid] else 0)
        learned = [row for row in group.trajectories if row.hint is not None]
        assert learned == [row for row in hinted if row.is_correct][:1]
        assert (len(group.trajectories) == len(group.rollouts) == 8 and group.accuracy == 0.0) or not fails
        for row in learned:
            assert len(row.prompt_ids) > 1, "learned with the hint in its prompt"
            assert not row.is_off_policy and set(row.logp_behavior) == {HINTED_LOGP}
            kept += 1
    assert kept


@pytest.mark.parametrize("method", ["questa", "pope"])
def test_hinted_groups_have_one_level_and_are_learned_with_it_beside_bare_ones(method: str, tmp_path: Path) -> None:
    """QuestA shows half of the trace in the first of twelve steps, then a quarter; a level of POPE's is a prompt's."""
    with GraderPool(1, PATIENCE_S) as grader:
        found = _run(grader, tmp_path, method, num_steps=12)
    levels, bare, hinted = dict[str, int](), 0, 0
    for number, step in enumerate(found.steps, start=1):
        known = dict(levels)
        for group in step.groups:
            assert len(group.trajectories) == 8 and not group.replaced
            if not group.hinted:
                assert len(group.rollouts) == 8
                bare += HAS_STEPS[group.uid]
                continue
            hinted += 1
            assert HAS_STEPS[group.uid] and len(group.hinted) == 8 and not group.rollouts
            level = known.get(group.uid, 1) if method == "pope" else 2 if number == 1 else 1
            shown = Hint(level, "step 1\nstep 2" if (method, level) == ("questa", 2) else "step 1")
            for row in group.hinted:
                assert row.hint == shown and len(row.prompt_ids) > 1, "learned with the hint in its prompt"
                assert set(row.logp_behavior) == {HINTED_LOGP} and not row.is_off_policy
            levels[group.uid] = min(level + (not any(row.is_correct for row in group.hinted)), 4)
        assert step.metrics["batch/hinted_share"] == pytest.approx(fmean(bool(group.hinted) for group in step.groups))
    if method == "questa":
        assert not bare
    else:
        assert 0.3 < hinted / (hinted + bare) < 0.7
        assert found.state["levels"] == {"settled": levels, "recent": {}} and max(levels.values()) > 1


def test_stephint_has_levels_side_by_side_and_wrong_rows_take_nothing_from_their_hint(run):
    found = run("stephint")
    for group in (group for step in found.steps for group in step.groups):
        lengths = {len(trace.token_ids) for trace in _tasks()[int(group.uid[1:])].demonstrations}
        for row, share in zip(group.trajectories[4:], (0.2, 0.4, 0.6, 0.8), strict=True):
            wanted = {min(math.floor(round(length * share, 6)), length - 1) for length in lengths} or {0}
            assert row.source.count(Source.OFF_POLICY) in wanted
        assert not any(row.is_off_policy for row in group.trajectories[:4])
    for rows in found.steps[0].updates(1, 1):
        batch = collate([row.trajectory for row in rows], torch.tensor([row.advantage for row in rows]), pad_id=0)
        weights = dict(zip(("on_policy", "hint"), _token_weights(found, batch), strict=True))
        wrong = batch.is_off_policy_BT & (batch.advantage_BT < 0)
        assert wrong.any() and not weights["hint"][wrong].any()
        learned = batch.is_off_policy_BT & (batch.advantage_BT > 0)
        assert learned.any() and bool((weights["hint"][learned] > 0).all())


def _token_weights(found: Run, batch: TrainBatch) -> torch.Tensor:
    objective = objective_at(found.settings.objective.terms, 1, STEPS, max_response_tokens=64)
    return token_weights(objective, batch, lambda tensor: tensor)


def test_critique_grpo_gives_one_row_of_every_group_to_a_refinement(run: Callable[[str], Run]) -> None:
    found, chosen = run("critique_grpo"), Counter[float]()
    for step in found.steps:
        for group in step.groups:
            (refined,) = [row for row in group.trajectories if row.hint is not None]
            assert group.trajectories[-1] is refined and len(group.rollouts) == len(group.hinted) == 8
            assert refined.is_correct or not any(row.is_correct for row in group.hinted)
            assert refined.prompt_ids == (10 + int(group.uid[1:]),), "learned under the bare prompt"
            assert {*refined.source} == {Source.HINTED} and {*refined.logp_behavior} == {HINTED_LOGP}
            chosen[refined.reward] += 1
        for row in (row for update in step.updates(1, 2) for row in update):
            rewards = step.kept[row.group].rewards
            assert row.advantage == pytest.approx(row.trajectory.reward - sum(rewards) / 8), "all eight that stay"
    assert chosen[1.0], "`test_retries.py` has the groups whose refinements are all wrong"


def test_lte_replaces_failures_by_the_right_rows_of_a_second_round(run: Callable[[str], Run]) -> None:
    solved = Counter[int]()
    for group in (group for step in run("lte").steps for group in step.groups):
        fails = not any(row.is_correct for row in group.rollouts)
        learned = [row for row in group.trajectories if row.hint is not None]
        assert len(group.hinted) == (8 if fails else 0) and len(group.trajectories) == len(group.rollouts) == 8
        assert learned == [row for row in group.hinted if row.is_correct]
        for row in learned:
            assert row.hint == Hint(1, "Wrong answers: 8.") and len(row.prompt_ids) == 1
            assert {*row.source} == {Source.HINTED} and {*row.logp_behavior} == {HINTED_LOGP}
        solved[len(learned)] += fails
    assert len(solved) > 2, "groups with several numbers of right rows"


HAS_PIECES = {task.uid: any(len(trace.token_ids) > 2 for trace in task.demonstrations) for task in _tasks()}


def test_trapo_gives_as_much_of_a_trace_as_the_rows_before_have_failed(run: Callable[[str], Run]) -> None:
    """Four rollouts, then two rows, one and one; the trace of some prompts is too short for a quarter of it."""
    longest = Counter[int]()
    for group in (group for step in run("trapo").steps for group in step.groups):
        number = int(group.uid[1:])
        rows, traces = group.trajectories, [trace.token_ids for trace in _tasks()[number].demonstrations]
        for first, last, share, below in ((4, 6, 0.25, 0.5), (6, 7, 0.5, 0.7), (7, 8, 1.0, 0.9)):
            is_guided = sum(row.is_correct for row in rows[:first]) / first < below
            for row in rows[first:last]:
                given = row.source.count(Source.OFF_POLICY)
                wanted = {min(math.floor(len(ids) * share), len(ids) - 1) for ids in traces} if is_guided else set()
                assert given in (wanted or {0})
                longest[first] += given > 0
        assert len(rows) == 8 and not any(Source.OFF_POLICY in row.source for row in rows[:4])
    assert all(longest[first] for first in (4, 6, 7))


def test_bread_learns_from_what_follows_the_start_of_a_trace_where_rollouts_fail(run):
    found = run("bread")
    branched = 0
    for group in (group for step in found.steps for group in step.groups):
        fails = not any(row.is_correct for row in group.rollouts)
        tried = [row for row in (*group.trajectories, *group.replaced) if row.is_off_policy]
        assert len(group.rollouts) == len(group.trajectories) == 8
        assert bool(tried) == (fails and HAS_PIECES[group.uid])
        if any(row.is_correct for row in tried):
            branched += 1
            assert all(row.is_off_policy for row in group.trajectories), "the bare rollouts are not trained on"
            assert any(row.is_correct for row in group.trajectories)
            starts = {tuple(t for t, s in zip(row.response_ids, row.source, strict=True) if s is Source.OFF_POLICY)
                      for row in group.trajectories}  # fmt: skip
            assert len(starts) == 1, "all rows of the group begin with the same start"
            for row in group.trajectories:
                batch = collate([row], torch.ones(1), pad_id=0)
                learned = batch.response_mask_BT & ~batch.is_off_policy_BT
                assert int(learned.sum()) == row.source.count(Source.ON_POLICY) > 0
        else:
            assert not any(row.is_off_policy for row in group.trajectories)
    assert branched


@pytest.mark.parametrize("method", ["exgrpo", "prefix_rft", "relift"])
def test_every_pass_learns_the_same_updates_on_the_same_ranks(method: str, run: Callable[[str], Run]) -> None:
    found = run(method)
    rl = found.settings.rl.model_copy(update={"passes": 3})
    settings = found.settings.model_copy(update={"rl": rl})
    for number, step in enumerate(found.steps, start=1):
        for num_updates, num_ranks in CUTS:
            once = step.shards[num_updates, num_ranks]
            for one, thrice in zip(once, _learned(settings, step.kept, number, num_updates, num_ranks), strict=True):
                assert dataclasses.replace(thrice, updates=one.updates) == one, "no row is sent twice"
                count = len(one.updates)
                each = [thrice.updates[start : start + count] for start in range(0, 3 * count, count)]
                assert [Counter(taken) for taken in each] == [Counter(one.updates)] * 3
                assert len(thrice.updates) == 3 * count


def test_another_seed_and_another_step_deal_otherwise(run: Callable[[str], Run]) -> None:
    settings, step = run("exgrpo").settings, run("exgrpo").steps[-1]
    other = settings.model_copy(update={"seed": settings.seed + 1})
    assert _learned(settings, step.kept, STEPS, 2, 1) == step.shards[2, 1]
    assert _learned(settings, step.kept, STEPS + 1, 2, 1) != step.shards[2, 1]
    assert _learned(other, step.kept, STEPS, 2, 1) != step.shards[2, 1]
