"""Groups: rollouts first, then guided rows, then a replayed row; all but the last are graded. And which are kept."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE_S
from synthetic.trajectories import row_of
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits, EpisodeScoring
from luffy.config.grading import AnyGrader, GradingConfig, JudgeGrader, MathGrader, WeightedGrader
from luffy.config.group import DropZeroVariance, DynamicSampling, GroupConfig, GroupMeanAdvantage
from luffy.config.training import OverlongConfig
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

RIGHT, WRONG, END = 1, 2, 3
"""Tokens that the decoder below reads as the answer 7, as another, and as nothing."""


class Parrot:
    """An engine that says `script[i]` to its i-th request (in a circle) and remembers what it was asked."""

    def __init__(self, *script: Sequence[int]) -> None:
        self.requests: list[RolloutRequest] = []
        self._script = script

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        said = [tuple(self._script[i % len(self._script)]) for i in range(len(requests))]
        stops = (END, *params.stop_token_ids)
        return [
            Completion(
                token_ids=ids,
                logprobs=tuple(-0.5 / (1 + t) for t in range(len(ids))),
                finish_reason=FinishReason.STOP if ids[-1] in stops else FinishReason.LENGTH,
                weight_versions=(6,) * len(ids),
            )
            for ids in said
        ]

    def close(self) -> None: ...


def _decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def _collect(
    tasks: list[RolloutTask], step: int = 1, script: Sequence[int] = (RIGHT,), earlier: Sequence[str] = (), **group
) -> tuple[Parrot, list[Group]]:
    engine = Parrot(*((token, END) for token in script))
    config = GroupConfig.model_validate({"size": 4, "off_policy": 1} | group)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, _decode, SamplingParams(1.0, 8, ()), config, seed=0, total_steps=10)
        return engine, collector.collect(engine, tasks, step, earlier)


def _task(uid: str, answer: str, *traces: str, replayed: Trajectory | None = None) -> RolloutTask:
    return RolloutTask(uid, (5, 6), answer, tuple(Demonstration(text, (8, 9), None) for text in traces), replayed)


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
            sampler.sample(Parrot((WRONG, END)), [_task("p", "7")], [[Row((5, 6))]])


def test_a_prompt_without_a_trace_is_topped_up_with_rollouts() -> None:
    tasks = [_task("a", "7", r"\boxed{7}"), _task("b", "7")]
    for group, num_requests in (({}, 7), ({"off_policy": 4, "prefix": HALF}, 8)):
        engine, (with_trace, without) = _collect(tasks, **group)
        assert len(engine.requests) == num_requests
        assert len(with_trace.trajectories) == len(without.rollouts) == len(without.trajectories) == 4


def test_each_sample_of_a_prompt_has_a_seed_of_its_own_and_the_same_when_its_step_is_repeated() -> None:
    def seeds(*uids: str, **when: object) -> list[int]:
        return [request.seed for request in _collect([_task(uid, "7") for uid in uids], **when)[0].requests]

    first = seeds("a", "b", "a")
    assert len({*first}) == 12
    assert seeds("a", earlier=["a", "b"]) == first[8:], "a later round of the step goes on"
    assert seeds("a", "b") == first[:8]
    assert not {*first} & {*seeds("a", "b", step=2)}


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
    assert [row.is_correct for row in group.trajectories] == [False, False, False, True]
    assert len(group.rollouts) == 3
    # It is graded as one text: here the prefix says the answer, and the policy's own words another.
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


def test_a_rung_counts_every_row_before_it_those_with_a_trace_too() -> None:
    """Half of the rollouts are right, and two thirds of all six rows before the second rung."""
    rungs = ({"rows": 2, "share": 0.5, "below": 0.6}, {"rows": 1, "share": 0.5, "below": 0.6})
    engine, (group,) = _collect(
        [_known("a", 20, 21, 22, 23)], script=(RIGHT, RIGHT, WRONG, WRONG), size=7, off_policy=3,
        prefix={"length": {"kind": "by_success", "rungs": rungs}},
    )  # fmt: skip
    assert [request.prefix_ids for request in engine.requests] == [*[()] * 4, *[(20, 21)] * 2, ()]
    assert [row.is_correct for row in group.trajectories] == [True, True, False, False, True, True, True]


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


@pytest.mark.parametrize(
    ("script", "num_traces", "found"),
    [
        ((WRONG,) * 4, 1, "wwwt"),
        ((WRONG, RIGHT, WRONG, RIGHT), 1, "wrrt"),
        ((WRONG, RIGHT, RIGHT, WRONG), 3, "rrtt"),  # never that of a right one
        ((RIGHT, RIGHT, WRONG, RIGHT), 1, "rrwr"),
    ],
)
def test_traces_take_the_place_of_the_last_wrong_rollouts_where_the_policy_fails(script, num_traces, found):
    tasks = [_task(uid, "7", *[r"\boxed{7}"] * num_traces) for uid in "ab"]
    engine, (group, solved) = _collect(
        tasks, script=(*script, *[RIGHT] * 4), off_policy=num_traces, off_policy_when_accuracy_at_most=0.5
    )
    assert len(engine.requests) == 8
    assert "".join("t" if row.is_off_policy else "wr"[row.is_correct] for row in group.trajectories) == found
    # What made room still says how the policy does.
    assert [row.is_correct for row in group.replaced] == [False] * found.count("t")
    assert group.accuracy == script.count(RIGHT) / 4
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


@cache
def _tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer([r"3 + 4 = \boxed{7} \boxed{8}"] * 4)


@cache
def _conversation() -> RolloutTask:
    """A task with a demonstration of two turns, of which the first would be wrong."""
    turns = (Message("assistant", r"\boxed{8}"), Message("user", "7"), Message("assistant", r"\boxed{7}"))
    encoded = ConversationEncoder(_tokenizer()).trace(turns)
    trace = Demonstration(r"\boxed{7}", encoded.token_ids, None, encoded.source)
    return RolloutTask("a", (5, 6), "7", (trace,), messages=(Message("user", "3 + 4"),))


def _episodes(
    scoring: EpisodeScoring = EpisodeScoring(),  # noqa: B008 - frozen
    environment: type[Asking] = Asking,
    says: str = r"\boxed{7}",
    limits: Mapping[str, float] = {},
    **group: object,
) -> Group:
    """The conversation's group, whose responses are episodes in `environment`, each turn `says` and the stop token."""
    tokenizer = _tokenizer()
    config = GroupConfig.model_validate({"size": 4, "off_policy": 1} | group)
    scorer = EpisodeScorer(scoring, ("calls",))
    player = EpisodePlayer(environment, ConversationEncoder(tokenizer), EpisodeLimits(**limits), scorer)
    with GraderPool(1, PATIENCE_S) as grader:
        params = SamplingParams(1.0, 200, stop_token_ids(tokenizer))
        collector = GroupCollector(grader, partial(decode, tokenizer), params, config, 0, 10, player)
        return collector.collect(Parrot(encode_traces(tokenizer, [says])[0]), [_conversation()], 1)[0]


def test_rollouts_and_a_demonstration_of_many_turns_share_a_group() -> None:
    group = _episodes()
    between = ConversationEncoder(_tokenizer()).between([Message("user", "7")])
    turn = tuple(encode_traces(_tokenizer(), [r"\boxed{7}"])[0])
    for row in group.trajectories[:3]:
        assert row.response_ids == turn + between + turn
        assert row.source == (
            (Source.ON_POLICY,) * len(turn) + (Source.ENVIRONMENT,) * len(between) + (Source.ON_POLICY,) * len(turn)
        )
        assert row.num_learnable == 2 * len(turn)
        assert row.measures == {"calls": 1.0, "turns": 2.0}
        assert row.weight_version == (6,) * len(turn) + (-1,) * len(between) + (6,) * len(turn)
    (trace,), demonstration = _conversation().demonstrations, group.trajectories[3]
    assert (demonstration.response_ids, demonstration.source) == (trace.token_ids, trace.source)
    assert demonstration.outcome is Outcome.CORRECT
    assert [row.is_off_policy for row in group.trajectories] == [False, False, False, True]


@pytest.mark.parametrize("share", [0.1, 0.45, 0.55, 0.7])
def test_a_prefix_never_ends_within_an_observation(share: float) -> None:
    row = _episodes(prefix={"length": {"kind": "uniform", "low": share, "high": share}}).trajectories[3]
    between = ConversationEncoder(_tokenizer()).between([Message("user", "7")])
    observed = [token for token, who in zip(row.response_ids, row.source, strict=True) if who is Source.ENVIRONMENT]
    assert tuple(observed[: len(between)]) == between
    num_given = len(row.source) - row.source[::-1].index(Source.OFF_POLICY)
    assert row.response_ids[:num_given] == _conversation().demonstrations[0].token_ids[:num_given]
    assert row.source[-1] is Source.ON_POLICY


def test_a_failed_episode_is_a_crash_and_not_a_wrong_answer() -> None:
    class Broken(Asking):
        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            raise RuntimeError("a bug")

    group = _episodes(environment=Broken, limits={"max_failed_share": 1.0}, size=2, off_policy=0)
    failures = [(row.outcome, row.finish_reason) for row in group.failed]
    assert failures == [(Outcome.CRASHED, FinishReason.ENVIRONMENT_ERROR)] * 2
    assert not group.trajectories and not group.is_learnable and kept_groups([group], None, 1) == []


def test_a_failed_episode_is_neither_compared_with_the_others_nor_learned_from() -> None:
    """With a penalty in the reward, its reward of 0 would have been the best one of the wrong rows."""
    episodes = itertools.count()

    class FirstCrashes(Asking):
        def __init__(self) -> None:
            self._crashes = next(episodes) == 0

        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            if self._crashes:
                raise RuntimeError("a server is down")
            return None

    scoring = EpisodeScoring(weights={"answer": 1.0, "calls": -0.5})
    group = _episodes(scoring, FirstCrashes, r"\boxed{8}", {"max_failed_share": 0.25})
    assert [row.reward for row in group.trajectories] == [-0.5, -0.5, 0.5]
    assert [row.outcome for row in group.failed] == [Outcome.CRASHED]
    config = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)
    shard = one_shard([group], config)
    assert shard.rows == group.trajectories, "the failed row is in no update, and in no denominator"
    assert shard.advantages == pytest.approx([-1 / 3, -1 / 3, 2 / 3])


class CrashesOnTheTrace(Asking):
    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if conversation[-1].content == r"\boxed{8}":
            raise RuntimeError("the tool of this demonstration is gone")
        return await super().respond(conversation)


PENALISED = EpisodeScoring(weights={"answer": 2.0, "turns": -0.25})


@pytest.mark.parametrize("group", [{}, {"off_policy_when_accuracy_at_most": 0.0}])
def test_the_share_of_failures_is_that_of_all_episodes_of_the_step(group: dict[str, float]) -> None:
    """The fallback plays a single trace, whose failure is one of nine and not one of one."""
    crashing = partial(_episodes, PENALISED, CrashesOnTheTrace, r"3 + 4 = \boxed{8}", size=8, **group)
    assert len(crashing({"max_failed_share": 0.13}).failed) == 1
    if group:
        assert len(crashing({"max_failed_share": 0.12}).failed) == 1
    else:
        with pytest.raises(EnvironmentFault, match="failed in 1 of 8 episodes"):
            crashing({"max_failed_share": 0.12})


def test_a_demonstration_whose_replay_fails_has_no_reward_and_leaves_its_group() -> None:
    group = _episodes(PENALISED, CrashesOnTheTrace, limits={"max_failed_share": 0.25})
    assert len(group.trajectories) == len(group.rollouts) == 3
    assert [row.response_ids for row in group.failed] == [_conversation().demonstrations[0].token_ids]
    assert not group.failed_rollouts and group.is_learnable


def test_a_rubric_rewards_a_demonstration_as_rollouts_and_for_its_own_turns_alone() -> None:
    """It is played again to be measured. An environment that would go on after it is not answered."""

    class Endless(Asking):
        async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
            return [Message("user", "7")]

    group = _episodes(PENALISED)
    assert [row.reward for row in group.trajectories] == [2.0 - 0.5] * 4
    assert group.trajectories[3].response_ids == _conversation().demonstrations[0].token_ids
    group = _episodes(PENALISED, Endless, r"\boxed{8}", {"max_turns": 4}, size=2)
    assert [row.measures["turns"] for row in group.trajectories] == [4.0, 2.0]
    assert group.trajectories[1].reward == 2.0 - 0.5


def test_a_measure_of_the_group_compares_rollouts_and_demonstration() -> None:
    measures = {"rank": "synthetic.episode_measures:rank", "first": "synthetic.episode_measures:best_of"}
    group = _episodes(EpisodeScoring(group_measures=measures, weights={"answer": 1.0, "rank": 0.5}))
    assert [row.measures["rank"] for row in group.trajectories] == [0.0, 1.0, 2.0, 3.0]
    assert [row.measures["first"] for row in group.trajectories] == [1.0] * 4
    assert [row.reward for row in group.trajectories] == [1.0, 1.5, 2.0, 2.5]


@pytest.mark.parametrize(("function", "error"), [("breaks_for_groups", "ValueError"), ("forgets_one", "TypeError")])
def test_a_failing_measure_of_the_group_is_no_silent_zero(function, error, caplog):
    scoring = EpisodeScoring(group_measures={"bad": f"synthetic.episode_measures:{function}"})
    with pytest.raises(EnvironmentFault, match="failed in 4 of 4 episodes"):
        _episodes(scoring)
    assert error in caplog.text
    rows = [(Row((5,)), Grade(Outcome.CORRECT, "7"))] * 2
    (crashed,) = with_group_measures(EpisodeScorer(scoring, ()), [_conversation()], [rows])
    found = [(row.has_failed, grade.outcome, grade.reward) for row, grade in crashed]
    assert found == [(True, Outcome.CRASHED, 0.0)] * 2
    assert error in crashed[0][1].reason


PIECES = {5: "x", 6: r"\boxed{7}", 7: "</answer>", 8: r"\boxed{8}", 9: r"\boxed{8}</ans", 10: "wer>ever after"}
"""What the tokens say to the decoder of the tests of stop texts; the last two only together say where to stop."""


def _stopped(task: RolloutTask, said: Sequence[int], **group) -> tuple[Parrot, Group]:
    stops = StopTexts(("</answer>",), lambda ids: "".join(PIECES.get(i, "?") for i in ids))
    config = GroupConfig.model_validate({"size": 2, "off_policy": 0} | group)
    params = SamplingParams(1.0, 8, (), stop=stops.texts)
    engine = Parrot(said)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, stops.text, params, config, seed=0, total_steps=10, stops=stops)
        (group,) = collector.collect(engine, [task], step=1)
    return engine, group


@pytest.mark.parametrize(("answer", "said"), [("7", (6, 7, 8, 8)), ("8", (9, 10, 6, 6))])
def test_a_rollout_is_learned_from_up_to_its_stop_text_and_graded_up_to_there(answer, said):
    """What the policy says after it, another answer, counts for nothing."""
    _, group = _stopped(_task("a", answer), said)
    for row in group.trajectories:
        assert (row.response_ids, row.logp_behavior, row.weight_version) == (said[:2], (-0.5, -0.25), (6, 6))
        assert row.finish_reason is FinishReason.STOP and not row.is_truncated
        assert row.is_correct


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


def test_overlong_rows_are_punished_as_in_equation_13_and_demonstrations_are_not() -> None:
    """arXiv 2503.14476: 0 up to L_max - L_cache, then (L_max - L_cache - |y|) / L_cache, at L_max -1."""
    overlong = OverlongConfig(buffer_tokens=4096)
    for length in (1, 16383, 16384, 16385, 18000, 20479, 20480):
        expected = 0.0 if length <= 20480 - 4096 else ((20480 - 4096) - length) / 4096
        assert overlong.punishment(length, 20480) == expected
    assert OverlongConfig(buffer_tokens=4, penalty=0.5).punishment(99, 8) == -0.5
    config = GroupConfig.model_validate({"size": 3, "off_policy": 1})
    lengths = [(RIGHT, *[5] * n, END) for n in (1, 5)]
    params, punished = SamplingParams(1.0, 8, ()), OverlongConfig(buffer_tokens=4)
    with GraderPool(1, PATIENCE_S) as grader:
        collector = GroupCollector(grader, _decode, params, config, seed=0, total_steps=10, overlong=punished)
        (group,) = collector.collect(Parrot(*lengths), [_task("a", "7", r"\boxed{7}" + "x" * 9)], 1)
    assert [(row.reward, row.outcome) for row in group.trajectories] == [
        (reward, Outcome.CORRECT) for reward in (1.0, 0.25, 1.0)
    ]


def test_the_number_of_tokens_is_a_measure_of_every_response() -> None:
    kind = WeightedGrader.model_validate_json(
        '{"kind": "weighted", "parts": [{"weight": 1, "grader": "math"},'
        ' {"weight": -0.125, "grader": {"kind": "measure", "name": "tokens"}}]}'
    )
    config = GroupConfig.model_validate({"size": 1, "off_policy": 0})
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
        collector = GroupCollector(grader, _decode, SamplingParams(1.0, 8, ()), config, seed=0, total_steps=10)
        (group,) = collector.collect(Parrot((RIGHT, 5, END)), [_task("a", "7")], 1)
    assert [row.reward for row in group.trajectories] == [1 - 3 / 8]
    episode = _episodes(EpisodeScoring(weights={"tokens": 1.0})).trajectories[0]
    assert episode.reward == episode.num_learnable and not episode.measures.keys() & {"tokens"}
