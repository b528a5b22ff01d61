"""Groups: rollouts first, then guided rows, then a replayed row; all but the last are graded. And which are kept."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S
from synthetic.trajectories import row_of
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits, EpisodeScoring
from luffy.config.grading import AnyGrader, GradingConfig, JudgeGrader, MathGrader
from luffy.config.group import DropZeroVariance, DynamicSampling, GroupConfig, GroupMeanAdvantage
from luffy.data.conversations import ConversationEncoder
from luffy.data.templates import decode, encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.rubric import EpisodeScorer
from luffy.errors import EnvironmentFault, LostError
from luffy.grading.pool import GraderPool
from luffy.grading.request import Grade, Problem
from luffy.rl.groups import GroupCollector, kept_groups, needs_more
from luffy.rl.rows import Demonstration, RolloutTask, Row, RowSampler, with_group_measures
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams, StopTexts
from luffy.training.batching import one_shard
from luffy.types import FinishReason, Group, Message, Outcome, Source, Trajectory

SCORER, LIMITS = EpisodeScorer(EpisodeScoring(), ("calls",)), EpisodeLimits()
RIGHT, WRONG = 1, 2
"""Tokens that the decoder below reads as the answer 7 and as another."""


class Parrot:
    """An engine that says `script[i]` to its i-th request (in a circle) and remembers what it was asked."""

    def __init__(self, script: Sequence[int] = (RIGHT,)) -> None:
        self.requests: list[RolloutRequest] = []
        self._script = script

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        return [
            Completion(
                (self._script[i % len(self._script)], 3), (-0.5, -0.25), FinishReason.STOP, weight_versions=(6, 6)
            )
            for i in range(len(requests))
        ]

    def close(self) -> None: ...


def _decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def _collect(
    tasks: list[RolloutTask], step: int = 1, script: Sequence[int] = (RIGHT,), earlier: Sequence[str] = (), **group
) -> tuple[Parrot, list[Group]]:
    engine = Parrot(script)
    config = GroupConfig.model_validate({"size": 4, "off_policy": 1} | group)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, _decode, SamplingParams(1.0, 8, ()), config, seed=0, total_steps=10)
        return engine, collector.collect(engine, tasks, step, earlier)


def _task(uid: str, answer: str, *traces: str, replayed: Trajectory | None = None) -> RolloutTask:
    return RolloutTask(uid, (5, 6), answer, tuple(Demonstration(text, (8, 9), None) for text in traces), replayed)


def _outcomes(group: Group) -> list[Outcome]:
    return [row.outcome for row in group.trajectories]


def test_a_demonstration_takes_a_row_of_the_group_and_is_graded_not_assumed() -> None:
    engine, groups = _collect([_task("right", "7", r"\boxed{7}"), _task("wrong", "7", r"\boxed{8}")])
    assert len(engine.requests) == 6
    for group, outcome in zip(groups, (Outcome.CORRECT, Outcome.WRONG), strict=True):
        assert [row.is_off_policy for row in group.trajectories] == [False, False, False, True]
        assert group.trajectories[-1].outcome is outcome
        assert group.trajectories[-1].source == (Source.OFF_POLICY,) * 2
        assert [row.reward for row in group.trajectories[:3]] == [1.0] * 3
        assert group.trajectories[0].weight_version == (6, 6)


@pytest.mark.parametrize("is_combined", [False, True])
def test_a_judge_that_cannot_be_reached_ends_the_stage_for_now(is_combined: bool) -> None:
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    kind = AnyGrader(of=(MathGrader(), judge)) if is_combined else judge
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
        sampler = RowSampler(grader, _decode, SamplingParams(1.0, 8, ()), None, None)
        with pytest.raises(LostError, match=r"1 of 1 responses have no verdict .* the same command resumes"):
            sampler.sample(Parrot((WRONG,)), [_task("p", "7")], [[Row((5, 6))]])


def test_a_prompt_without_a_trace_is_topped_up_with_a_rollout() -> None:
    engine, (with_trace, without) = _collect([_task("a", "7", r"\boxed{7}"), _task("b", "7")])
    assert len(engine.requests) == 7
    assert len(with_trace.trajectories) == len(without.trajectories) == 4
    assert not any(row.is_off_policy for row in without.trajectories)


def test_seeds_differ_between_samples_and_steps_and_repeat_for_the_same_step() -> None:
    first, _ = _collect([_task("a", "7"), _task("b", "7")], step=1)
    again, _ = _collect([_task("a", "7"), _task("b", "7")], step=1)
    later, _ = _collect([_task("a", "7"), _task("b", "7")], step=2)
    seeds = [request.seed for request in first.requests]
    assert len(set(seeds)) == 8
    assert seeds == [request.seed for request in again.requests]
    assert not set(seeds) & {request.seed for request in later.requests}


def test_a_prompt_that_comes_again_in_a_step_or_in_a_later_round_of_it_is_sampled_anew() -> None:
    one_round, _ = _collect([_task("a", "7"), _task("b", "7"), _task("a", "7")])
    seeds = [request.seed for request in one_round.requests]
    assert len({*seeds}) == 12
    second, _ = _collect([_task("a", "7")], earlier=["a", "b"])
    assert [request.seed for request in second.requests] == seeds[8:]


FALLING = {"kind": "linear", "start": 1.0, "end": 0.0}
WHOLE_THEN_NOTHING = {"length": {"kind": "uniform", "low": FALLING, "high": FALLING}}
HALF = {"length": {"kind": "uniform", "low": 0.5, "high": 0.5}}
ANY = {"length": {"kind": "uniform", "low": 0.0, "high": 1.0}}


def _known(uid: str, *token_ids: int) -> RolloutTask:
    guide = Demonstration(r"\boxed{7}", token_ids, tuple(-0.1 * (1 + i) for i in range(len(token_ids))))
    return RolloutTask(uid, (5, 6), "7", (guide,))


def test_a_hybrid_row_is_the_start_of_a_trace_and_what_the_policy_says_behind_it() -> None:
    engine, (group,) = _collect([_known("a", 20, 21, 22, 23)], script=(WRONG, WRONG, WRONG, RIGHT), prefix=HALF)
    row = group.trajectories[-1]
    assert engine.requests[-1].prefix_ids == (20, 21)
    assert row.response_ids == (20, 21, RIGHT, 3)
    assert row.source == (Source.OFF_POLICY,) * 2 + (Source.ON_POLICY,) * 2
    assert row.logp_behavior == (-0.1, -0.2, -0.5, -0.25)
    assert row.weight_version == (-1, -1, 6, 6)
    assert _outcomes(group) == [Outcome.WRONG] * 3 + [Outcome.CORRECT]
    assert len(group.rollouts) == 3


def test_a_hybrid_row_is_graded_as_one_text() -> None:
    """The answer that counts is said in the prefix, which the policy's own words alone would not show."""
    _, (group,) = _collect([_known("a", RIGHT, 21, 22, 23)], script=(WRONG,), prefix=HALF)
    assert group.trajectories[-1].is_correct


def test_a_prefix_never_holds_the_stop_token_and_an_empty_one_makes_a_rollout() -> None:
    engine, (whole,) = _collect([_known("a", 20, 21)], prefix=WHOLE_THEN_NOTHING)
    assert len(engine.requests) == 4
    assert engine.requests[-1].prefix_ids == (20,)
    assert whole.trajectories[-1].response_ids == (20, RIGHT, 3)
    _, (nothing_given,) = _collect([_known("a", 21)], prefix=WHOLE_THEN_NOTHING)
    assert len(nothing_given.rollouts) == 4
    engine, (empty,) = _collect([_known("a", 20, 21)], step=10, prefix=WHOLE_THEN_NOTHING)
    assert len(engine.requests) == 4
    assert len(empty.rollouts) == 4


def test_one_trace_may_guide_every_row_and_shared_rows_are_given_the_same() -> None:
    traces = tuple(Demonstration("", tuple(range(start, start + 50)), None) for start in (100, 200))
    task = RolloutTask("a", (5, 6), "7", traces)
    engine, (group,) = _collect([task], off_policy=4, prefix=ANY | {"shared": True})
    assert len(group.trajectories) == 4
    assert len({request.prefix_ids for request in engine.requests}) == 1
    assert len({request.seed for request in engine.requests}) == 4
    engine, _ = _collect([task], off_policy=4, prefix=ANY)
    assert len({request.prefix_ids for request in engine.requests}) == 4
    assert {request.prefix_ids[0] // 100 for request in engine.requests} == {1, 2}


def test_a_prompt_without_a_trace_has_rollouts_in_place_of_hybrid_rows() -> None:
    _, (group,) = _collect([_task("a", "7")], off_policy=4, prefix=HALF)
    assert len(group.rollouts) == 4


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ((WRONG,) * 4, [Outcome.WRONG] * 3 + ["trace"]),
        ((WRONG, RIGHT, WRONG, RIGHT), [Outcome.WRONG, Outcome.CORRECT, Outcome.CORRECT, "trace"]),
        ((RIGHT, RIGHT, WRONG, RIGHT), [Outcome.CORRECT, Outcome.CORRECT, Outcome.WRONG, Outcome.CORRECT]),
    ],
)
def test_traces_take_the_place_of_the_last_wrong_rollouts_where_the_policy_fails(script, expected):
    engine, (group,) = _collect([_task("a", "7", r"\boxed{7}")], script=script, off_policy_when_accuracy_at_most=0.5)
    assert len(engine.requests) == 4
    found = ["trace" if row.is_off_policy else row.outcome for row in group.trajectories]
    assert found == expected


def test_traces_never_take_the_place_of_right_rollouts() -> None:
    traces = [r"\boxed{7}", r"\boxed{8}", r"\boxed{7}"]
    _, (group,) = _collect(
        [_task("a", "7", *traces)],
        script=(WRONG, RIGHT, RIGHT, WRONG),
        off_policy=3,
        off_policy_when_accuracy_at_most=0.5,
    )
    assert [row.is_off_policy for row in group.trajectories] == [False, False, True, True]
    assert [row.is_correct for row in group.trajectories[:2]] == [True, True]
    # What made room still says how the policy does.
    assert [row.is_correct for row in group.replaced] == [False, False]
    assert group.accuracy == 0.5


def test_only_failing_groups_of_a_batch_get_traces() -> None:
    tasks = [_task(uid, "7", r"\boxed{7}") for uid in "ab"]
    script = (WRONG,) * 4 + (RIGHT,) * 4
    _, (failing, solved) = _collect(tasks, script=script, off_policy_when_accuracy_at_most=0.0)
    assert [row.is_off_policy for row in failing.trajectories] == [False, False, False, True]
    assert len(solved.rollouts) == 4


def test_a_replayed_row_takes_the_place_of_one_rollout_and_keeps_what_was_recorded() -> None:
    _, (earlier,) = _collect([_task("a", "7")], off_policy=0)
    # A reward that grading would not give shows that it is not graded again.
    stored = replace(earlier.trajectories[0], reward=0.75, weight_version=(2, 2))
    engine, (group,) = _collect([_task("a", "7", r"\boxed{7}", replayed=stored)], step=9)
    assert len(engine.requests) == 2
    assert [row.source[0] for row in group.trajectories] == [0, 0, Source.OFF_POLICY, Source.REPLAY]
    assert group.trajectories[-1] == replace(stored, source=(Source.REPLAY,) * 2)
    assert len(group.rollouts) == 2


class Asking:
    """Answers every first turn with a token of its own."""

    async def reset(self, problem: Problem) -> Sequence[Message]:
        return ()

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        return [Message("user", "7")] if sum(turn.role == "assistant" for turn in conversation) == 1 else None

    def counts(self) -> Mapping[str, float]:
        return {"calls": 1.0}

    async def close(self) -> None: ...


def _episodes(
    task: RolloutTask,
    tokenizer: PreTrainedTokenizerBase,
    scorer: EpisodeScorer = SCORER,
    environment: type[Asking] = Asking,
    limits: EpisodeLimits = LIMITS,
    says: str = r"\boxed{7}",
    **group: object,
) -> Group:
    """The group of a task whose responses are episodes in `environment`, each turn `says` and the stop token."""
    config = GroupConfig.model_validate({"size": 4, "off_policy": 1} | group)
    player = EpisodePlayer(environment, ConversationEncoder(tokenizer), limits, scorer)
    with GraderPool(1, PATIENCE_S) as grader:
        params = SamplingParams(1.0, 200, stop_token_ids(tokenizer))
        collector = GroupCollector(grader, partial(decode, tokenizer), params, config, 0, 10, player)
        return collector.collect(SayingInFull(tuple(encode_traces(tokenizer, [says])[0])), [task], 1)[0]


class SayingInFull(Parrot):
    def __init__(self, turn: tuple[int, ...]) -> None:
        super().__init__()
        self._turn = turn

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        n = len(self._turn)
        return [Completion(self._turn, (-0.5,) * n, FinishReason.STOP, (6,) * n) for _ in requests]


def _conversation_task(tokenizer: PreTrainedTokenizerBase) -> tuple[RolloutTask, Demonstration]:
    turns = (Message("assistant", r"\boxed{8}"), Message("user", "7"), Message("assistant", r"\boxed{7}"))
    encoded = ConversationEncoder(tokenizer).trace(turns)
    trace = Demonstration(r"\boxed{7}", encoded.token_ids, None, encoded.source)
    return RolloutTask("a", (5, 6), "7", (trace,), messages=(Message("user", "3 + 4"),)), trace


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer([r"3 + 4 = \boxed{7} \boxed{8}"] * 4)


def test_rollouts_and_a_demonstration_of_many_turns_share_a_group(tokenizer: PreTrainedTokenizerBase) -> None:
    task, trace = _conversation_task(tokenizer)
    group = _episodes(task, tokenizer)
    between = ConversationEncoder(tokenizer).between([Message("user", "7")])
    turn = tuple(encode_traces(tokenizer, [r"\boxed{7}"])[0])
    for row in group.trajectories[:3]:
        assert row.response_ids == turn + between + turn
        assert row.source == (
            (Source.ON_POLICY,) * len(turn) + (Source.ENVIRONMENT,) * len(between) + (Source.ON_POLICY,) * len(turn)
        )
        assert row.num_learnable == 2 * len(turn)
        assert row.measures == {"calls": 1.0, "turns": 2.0}
        assert row.weight_version == (6,) * len(turn) + (-1,) * len(between) + (6,) * len(turn)
    demonstration = group.trajectories[3]
    assert (demonstration.response_ids, demonstration.source) == (trace.token_ids, trace.source)
    assert demonstration.outcome is Outcome.CORRECT  # its first turn would be wrong
    assert [row.is_off_policy for row in group.trajectories] == [False, False, False, True]


@pytest.mark.parametrize("share", [0.1, 0.45, 0.55, 0.7])
def test_a_prefix_never_ends_within_an_observation(tokenizer: PreTrainedTokenizerBase, share: float) -> None:
    task, trace = _conversation_task(tokenizer)
    group = _episodes(task, tokenizer, prefix={"length": {"kind": "uniform", "low": share, "high": share}})
    row = group.trajectories[3]
    between = ConversationEncoder(tokenizer).between([Message("user", "7")])
    observed = [token for token, who in zip(row.response_ids, row.source, strict=True) if who is Source.ENVIRONMENT]
    assert tuple(observed[: len(between)]) == between
    num_given = len(row.source) - row.source[::-1].index(Source.OFF_POLICY)
    assert row.response_ids[:num_given] == trace.token_ids[:num_given]
    assert row.source[-1] is Source.ON_POLICY


def test_a_failed_episode_is_a_crash_and_not_a_wrong_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    task, _ = _conversation_task(tokenizer)

    class Broken(Asking):
        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            raise RuntimeError("a bug")

    limits = EpisodeLimits(max_failed_share=1.0)
    group = _episodes(task, tokenizer, environment=Broken, limits=limits, size=2, off_policy=0)
    assert [(row.outcome, row.finish_reason) for row in group.failed] == [
        (Outcome.CRASHED, FinishReason.ENVIRONMENT_ERROR)
    ] * 2
    assert not group.trajectories and not group.is_learnable and kept_groups([group], None, 1) == []


class OneCrashes(Asking):
    """The first of all episodes crashes."""

    episodes = itertools.count()

    def __init__(self) -> None:
        self._crashes = next(OneCrashes.episodes) == 0

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if self._crashes:
            raise RuntimeError("a server is down")
        return None


def test_a_failed_episode_is_neither_compared_with_the_others_nor_learned_from(tokenizer):
    """With a penalty in the reward, its reward of 0 would have been the best one of the wrong rows."""
    task, _ = _conversation_task(tokenizer)
    OneCrashes.episodes = itertools.count()
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 1.0, "calls": -0.5}), ("calls",))
    group = _episodes(task, tokenizer, scorer, OneCrashes, EpisodeLimits(max_failed_share=0.25), r"\boxed{8}")
    assert [row.reward for row in group.trajectories] == [-0.5, -0.5, 0.5]
    assert [row.outcome for row in group.failed] == [Outcome.CRASHED]
    config = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)
    shard = one_shard([group], config)
    assert shard.rows == group.trajectories, "the failed row is in no update, and in no denominator"
    assert shard.advantages == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


@pytest.mark.parametrize("group", [{"off_policy": 1}, {"off_policy": 1, "off_policy_when_accuracy_at_most": 0.0}])
def test_the_share_of_failures_is_that_of_all_episodes_of_the_step(tokenizer, group):
    """The fallback plays a single trace, whose failure is one of nine and not one of one."""
    task, _ = _conversation_task(tokenizer)
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 1.0, "turns": -0.25}), ("calls",))
    says = r"3 + 4 = \boxed{8}"
    for allowed, raises in ((0.12, len(group) == 1), (0.13, False)):
        limits = EpisodeLimits(max_failed_share=allowed)
        if raises:
            with pytest.raises(EnvironmentFault, match="failed in 1 of 8 episodes"):
                _episodes(task, tokenizer, scorer, CrashesOnTheTrace, limits, says, size=8, **group)
        else:
            found = _episodes(task, tokenizer, scorer, CrashesOnTheTrace, limits, says, size=8, **group)
            assert len(found.failed) == 1


class CrashesOnTheTrace(Asking):
    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if conversation[-1].content == r"\boxed{8}":
            raise RuntimeError("the tool of this demonstration is gone")
        return await super().respond(conversation)


def test_a_demonstration_whose_replay_fails_has_no_reward_and_leaves_its_group(tokenizer):
    task, trace = _conversation_task(tokenizer)
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 1.0, "turns": -0.25}), ("calls",))
    group = _episodes(task, tokenizer, scorer, CrashesOnTheTrace, EpisodeLimits(max_failed_share=0.25))
    assert len(group.trajectories) == len(group.rollouts) == 3
    assert [row.response_ids for row in group.failed] == [trace.token_ids]
    assert not group.failed_rollouts and group.is_learnable


def test_a_rubric_rewards_rollouts_and_demonstrations_alike(tokenizer: PreTrainedTokenizerBase) -> None:
    """The demonstration is played again to be measured: two turns, as the rollouts."""
    task, trace = _conversation_task(tokenizer)
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 2.0, "turns": -0.25}), ("calls",))
    group = _episodes(task, tokenizer, scorer)
    assert [row.reward for row in group.trajectories] == [2.0 - 0.5] * 4
    assert group.trajectories[3].response_ids == trace.token_ids


def test_a_demonstration_is_rewarded_for_its_own_turns_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    """The environment would go on after the trace; the policy does not finish it."""

    class Endless(Asking):
        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            return [Message("user", "7")]

    task, _ = _conversation_task(tokenizer)
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 2.0, "turns": -0.25}), ("calls",))
    player = EpisodePlayer(Endless, ConversationEncoder(tokenizer), EpisodeLimits(max_turns=4), scorer)
    engine = SayingInFull(tuple(encode_traces(tokenizer, [r"\boxed{8}"])[0]))
    with GraderPool(1, PATIENCE_S) as grader:
        params = SamplingParams(1.0, 200, stop_token_ids(tokenizer))
        config = GroupConfig(size=2, off_policy=1)
        collector = GroupCollector(grader, partial(decode, tokenizer), params, config, 0, 10, player)
        (group,) = collector.collect(engine, [task], 1)
    assert [row.measures["turns"] for row in group.trajectories] == [4.0, 2.0]
    assert group.trajectories[1].reward == 2.0 - 0.5
    assert len(engine.requests) == 4, "all of the rollout"


def test_a_measure_of_the_group_compares_rollouts_and_demonstration(tokenizer: PreTrainedTokenizerBase) -> None:
    task, _ = _conversation_task(tokenizer)
    scoring = EpisodeScoring(
        group_measures={"rank": "synthetic.episode_measures:rank", "first": "synthetic.episode_measures:best_of"},
        weights={"answer": 1.0, "rank": 0.5},
    )
    group = _episodes(task, tokenizer, EpisodeScorer(scoring, ("calls",)))
    assert [row.measures["rank"] for row in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [row.measures["first"] for row in group.trajectories] == [1.0] * 4
    assert [row.reward for row in group.trajectories] == [1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(("function", "error"), [("breaks_for_groups", "ValueError"), ("forgets_one", "TypeError")])
def test_a_failing_measure_of_the_group_is_no_silent_zero(tokenizer, function, error, caplog):
    task, _ = _conversation_task(tokenizer)
    scoring = EpisodeScoring(group_measures={"bad": f"synthetic.episode_measures:{function}"})
    with pytest.raises(EnvironmentFault, match="failed in 4 of 4 episodes"):
        _episodes(task, tokenizer, EpisodeScorer(scoring, ("calls",)))
    assert error in caplog.text
    rows = [(Row((5,)), Grade(Outcome.CORRECT, "7"))] * 2
    (crashed,) = with_group_measures(EpisodeScorer(scoring, ()), [task], [rows])
    assert [(row.has_failed, grade.outcome, grade.reward) for row, grade in crashed] == [
        (True, Outcome.CRASHED, 0.0)
    ] * 2
    assert error in crashed[0][1].reason


PIECES = {5: "x", 6: r"\boxed{7}", 7: "</answer>", 8: r"\boxed{8}", 9: r"\boxed{8}</ans", 10: "wer>ever after"}
"""What the tokens say to the decoder of the tests of stop texts; the last two only together say where to stop."""


class Fixed(Parrot):
    """An engine that says all of `script` to every request."""

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        said = Completion(tuple(self._script), (-0.5,) * len(self._script), FinishReason.LENGTH, (6,) * 4)
        return [said for _ in requests]


def _stopped(task: RolloutTask, script: Sequence[int], **group) -> tuple[Parrot, Group]:
    stops = StopTexts(("</answer>",), lambda ids: "".join(PIECES.get(i, "?") for i in ids))
    config = GroupConfig.model_validate({"size": 2, "off_policy": 0} | group)
    params = SamplingParams(1.0, 8, (), stop=stops.texts)
    engine = Fixed(script)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, stops.text, params, config, seed=0, total_steps=10, stops=stops)
        (group,) = collector.collect(engine, [task], step=1)
    return engine, group


def test_a_rollout_is_learned_from_up_to_its_stop_text_and_graded_up_to_there() -> None:
    """What the policy says after it, another answer, counts for nothing."""
    _, group = _stopped(_task("a", "7"), (6, 7, 8, 8))
    for row in group.trajectories:
        assert (row.response_ids, row.logp_behavior, row.weight_version) == ((6, 7), (-0.5, -0.5), (6, 6))
        assert row.finish_reason is FinishReason.STOP and not row.is_truncated
        assert row.is_correct


def test_a_stop_text_across_two_tokens_is_learned_whole_and_graded_without_the_rest() -> None:
    _, group = _stopped(_task("a", "8"), (9, 10, 6, 6))
    assert group.trajectories[0].response_ids == (9, 10)
    assert group.trajectories[0].is_correct


def test_a_prefix_leaves_its_stop_text_to_the_policy() -> None:
    """All but the last token of the trace would be given: that much lies behind its stop text."""
    trace = Demonstration(r"\boxed{7}</answer>", (5, 6, 7, 3, 3), None)
    whole = {"length": {"kind": "uniform", "low": 0.9, "high": 1.0}}
    engine, group = _stopped(RolloutTask("a", (5, 6), "7", (trace,)), (7, 8, 8, 8), off_policy=1, prefix=whole)
    assert engine.requests[-1].prefix_ids == (5, 6)
    row = group.trajectories[-1]
    assert row.response_ids == (5, 6, 7)
    assert row.source == (Source.OFF_POLICY, Source.OFF_POLICY, Source.ON_POLICY)
    assert row.is_correct


DROP = DropZeroVariance(kind="drop_zero_variance")
REFILL = DynamicSampling(kind="dynamic_sampling", max_rounds=3)


def _rewarded(uid: str, *rewards: float, trace: float | None = None) -> Group:
    traces = () if trace is None else (row_of(trace, source=Source.OFF_POLICY),)
    return Group(uid, (*map(row_of, rewards), *traces))


SILENT, SPEAKING = _rewarded("silent", 0.0, 0.0), _rewarded("speaking", 0.0, 1.0)
GUIDED = _rewarded("guided", 0.0, 0.0, trace=1.0)


def test_silent_groups_leave_only_where_that_is_asked_for_and_a_right_trace_beside_wrong_rollouts_is_a_signal() -> None:
    groups = [SILENT, SPEAKING, _rewarded("solved", 1.0, 1.0)]
    assert kept_groups(groups, None, wanted=1) == groups
    assert kept_groups(groups, DROP, wanted=1) == [SPEAKING]
    assert kept_groups([SILENT], DROP, wanted=1) == []
    assert kept_groups([GUIDED, _rewarded("no use", 1.0, trace=1.0)], DROP, wanted=2) == [GUIDED]


def test_refill_alone_asks_for_more_until_it_has_the_wanted_or_its_rounds_are_over() -> None:
    assert kept_groups([SPEAKING, SILENT, GUIDED, SPEAKING], REFILL, wanted=2) == [SPEAKING, GUIDED]
    assert not needs_more([SILENT, SILENT], REFILL, wanted=2, rounds_done=3)
    assert not any(needs_more([SILENT], other, wanted=2, rounds_done=1) for other in (DROP, None))


@given(st.lists(st.sampled_from([SILENT, SPEAKING, GUIDED]), max_size=8), st.integers(1, 4))
def test_refill_stops_exactly_when_it_has_what_it_wanted(groups: list[Group], wanted: int) -> None:
    complete = len(kept_groups(groups, REFILL, wanted)) == wanted
    assert needs_more(groups, REFILL, wanted, rounds_done=1) is not complete
