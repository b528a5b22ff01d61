"""Groups: rollouts first, then guided rows, then a replayed row; episodes, stop texts, rewards and their lack."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.scripted_runs import Parrot
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import EpisodeLimits, EpisodeScoring
from luffy.config.grading import (
    AnyGrader,
    BothGrader,
    CustomGrader,
    GradingConfig,
    JudgeGrader,
    MathGrader,
    WeightedGrader,
    WeightedPart,
)
from luffy.config.group import GroupConfig, GroupMeanAdvantage
from luffy.config.training import OverlongConfig
from luffy.data.conversations import ConversationEncoder
from luffy.data.templates import decode, encode_traces, stop_token_ids
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.episodes import EpisodePlayer
from luffy.environments.rubric import EpisodeScorer
from luffy.errors import ConfigError, EnvironmentFault, LostError
from luffy.grading.pool import GraderPool
from luffy.grading.request import Problem
from luffy.rl.group_starts import Texts, open_starts
from luffy.rl.groups import GroupCollector, kept_groups
from luffy.rl.rows import Demonstration, RolloutTask, Row, RowSampler
from luffy.rollout.engine import SamplingParams, StopTexts
from luffy.training.batching import one_shard
from luffy.types import FinishReason, Group, Message, Outcome, Source, Trajectory

RIGHT, WRONG, END = 1, 2, 3
"""Tokens that the decoder below reads as the answer 7, as another, and as nothing."""
PARAMS = SamplingParams(1.0, 8, ())
MEAN = GroupMeanAdvantage(kind="group_mean", population="joint", scale_by_std=False)


def parrot(*script: Sequence[int]) -> Parrot:
    """Says `script[i]` to the i-th request of a call, in a circle."""
    return Parrot(lambda place, _: script[place % len(script)])


def _decode(ids: Sequence[int]) -> str:
    return r"\boxed{7}" if RIGHT in ids else r"\boxed{8}"


def traces(rows: int = 1, **more: object) -> dict[str, object]:
    return {"starts": {"trace": {"show": {"kind": "trace"}, "rows": rows, **more}}}


def prefixes(dose: object, rows: int = 1, **more: object) -> dict[str, object]:
    return {"starts": {"prefix": {"show": {"kind": "prefix"}, "dose": dose, "rows": rows, **more}}}


def _collector(grader: GraderPool, group: Mapping[str, object], **more: object) -> GroupCollector:
    config = GroupConfig.model_validate({"size": 4, **traces()} | group)
    parts = {"decode": _decode, "params": PARAMS, "seed": 0, "total_steps": 10} | more
    texts = Texts(lambda messages: (), parts["decode"], parts["decode"], parts.get("stops"))
    return GroupCollector(grader, group=config, starts=open_starts(config.starts, texts, 0, 10, config.size), **parts)


def _collect(
    grader: GraderPool,
    tasks: list[RolloutTask],
    step: int = 1,
    script: Sequence[int] = (RIGHT,),
    earlier: Sequence[str] = (),
    **group: object,
) -> tuple[Parrot, list[Group]]:
    engine = parrot(*((token, END) for token in script))
    return engine, _collector(grader, group).collect(engine, tasks, step, earlier)


def _trace(*ids: int, text: str = r"\boxed{7}") -> Demonstration:
    return Demonstration(text, ids, tuple(-0.1 * (1 + i) for i in range(len(ids))))


def _task(uid: str, answer: str, *traces: Demonstration, replayed: Trajectory | None = None) -> RolloutTask:
    return RolloutTask(uid, (5, 6), answer, traces, replayed)


def _letters(rows: Sequence[Trajectory]) -> str:
    """Of each row: rollout, trace, or start of a trace and what the policy says behind it; a capital is right."""
    found = ""
    for row in rows:
        letter = "t" if {*row.source} == {Source.OFF_POLICY} else "s" if Source.OFF_POLICY in row.source else "r"
        found += letter.upper() if row.is_correct else letter
    return found


HALF, ANY = prefixes(0.5), {"kind": "uniform", "low": 0.0, "high": 1.0}
RUNGS = ({"rows": 2, "share": 0.5, "below": 0.6}, {"rows": 1, "share": 0.5, "below": 0.6})
LADDER = {"size": 7, **prefixes({"kind": "ladder", "rungs": RUNGS}, 3)}
HALF_FAIL = {"when": {"accuracy_at_most": 0.5}}
GOOD, BAD, SAYS_7 = _trace(20, 21, 22, 23), _trace(20, 21, text=r"\boxed{8}"), _trace(RIGHT, 21, 22, 23)
R, W = RIGHT, WRONG


@pytest.mark.parametrize(
    ("group", "traces", "script", "num_given", "learned", "replaced"),
    [
        # A whole trace takes a row, and is graded, not assumed; without one there are more rollouts.
        ({}, [GOOD], [R], [0, 0, 0], "RRRT", ""),
        ({}, [BAD], [R], [0, 0, 0], "RRRt", ""),
        ({}, [], [R], [0, 0, 0, 0], "RRRR", ""),
        # Starts of one trace are as many as are wanted; start and continuation are graded as one text.
        (prefixes(0.5, 4), [GOOD], [R], [2, 2, 2, 2], "SSSS", ""),
        (prefixes(0.5, 4), [], [R], [0, 0, 0, 0], "RRRR", ""),
        (HALF, [GOOD], [W, W, W, R], [0, 0, 0, 2], "rrrS", ""),
        (HALF, [SAYS_7], [W], [0, 0, 0, 2], "rrrS", ""),
        # Before the second rung two thirds of all rows are right, though half of the rollouts.
        (LADDER, [GOOD], [R, R, W, W], [0, 0, 0, 0, 2, 2, 0], "RRrrSSR", ""),
        (LADDER, [GOOD], [R, W, W, W], [0, 0, 0, 0, 2, 2, 2], "RrrrSsS", ""),
        (LADDER, [GOOD], [R, R, R, W], [0, 0, 0, 0, 0, 0, 0], "RRRrRRR", ""),
        # Traces take the places of the last wrong rollouts where the policy fails, never that of a right one.
        (traces(**HALF_FAIL), [GOOD], [W, W, W, W], [0, 0, 0, 0], "rrrT", "r"),
        (traces(**HALF_FAIL), [GOOD], [W, R, W, R], [0, 0, 0, 0], "rRRT", "r"),
        (traces(3, **HALF_FAIL), [GOOD] * 3, [W, R, R, W], [0, 0, 0, 0], "RRTT", "rr"),
        (traces(**HALF_FAIL), [GOOD], [R, R, W, R], [0, 0, 0, 0], "RRrR", ""),
    ],
)
def test_the_rows_of_a_group(grader, group, traces, script, num_given, learned, replaced):
    """And what made room still says how the policy does. Every request has a seed of its own."""
    engine, (found,) = _collect(grader, [_task("a", "7", *traces)], script=script, **group)
    assert [len(request.prefix_ids) for request in engine.requests] == num_given
    assert (_letters(found.trajectories), _letters(found.replaced)) == (learned, replaced)
    rollouts = [letter for letter in learned + replaced if letter in "rR"]
    assert found.accuracy == (rollouts.count("R") / len(rollouts) if rollouts else 0.0)
    assert len({request.seed for request in engine.requests}) == len(num_given)


def test_each_token_of_a_row_says_where_it_comes_from(grader: GraderPool) -> None:
    engine, (group,) = _collect(grader, [_task("a", "7", GOOD)], script=(WRONG, WRONG, WRONG, RIGHT), **HALF)
    assert engine.requests[-1].prefix_ids == (20, 21)
    row = group.trajectories[-1]
    assert row.response_ids == (20, 21, RIGHT, END)
    assert row.source == (Source.OFF_POLICY,) * 2 + (Source.ON_POLICY,) * 2
    assert row.logp_behavior == (-0.1, -0.2, -0.5, -0.25)
    assert row.weight_version == (-1, -1, 6, 6)
    _, (group,) = _collect(grader, [_task("a", "7", GOOD)])
    assert (group.trajectories[0].weight_version, group.trajectories[0].reward) == ((6, 6), 1.0)


@pytest.mark.parametrize("is_combined", [False, True])
def test_a_judge_that_cannot_be_reached_ends_the_stage_for_now(is_combined: bool) -> None:
    judge = JudgeGrader(url="http://127.0.0.1:9/v1", model="m", retries=0)
    kind = AnyGrader(of=(MathGrader(), judge)) if is_combined else judge
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
        sampler = RowSampler(grader, _decode, PARAMS, None, None)
        with pytest.raises(LostError, match=r"1 of 1 responses have no verdict .* the same command resumes"):
            sampler.sample(parrot((WRONG, END)), [_task("p", "7")], [[Row((5, 6))]])


def test_each_sample_of_a_prompt_has_a_seed_of_its_own_and_the_same_when_its_step_is_repeated(grader) -> None:
    def seeds(*uids: str, **when: object) -> list[int]:
        return [request.seed for request in _collect(grader, [_task(uid, "7") for uid in uids], **when)[0].requests]

    first = seeds("a", "b", "a")
    assert len({*first}) == 12
    assert seeds("a", earlier=["a", "b"]) == first[8:], "a later round of the step goes on"
    assert seeds("a", "b") == first[:8]
    assert not {*first} & {*seeds("a", "b", step=2)}


def test_one_trace_may_guide_every_row_and_shared_rows_are_given_the_same(grader: GraderPool) -> None:
    task = _task("a", "7", *(_trace(*range(start, start + 50)) for start in (100, 200)))
    for is_shared, num_starts in ((True, 1), (False, 4)):
        engine, (group,) = _collect(grader, [task], **prefixes(ANY, 4, shared=is_shared))
        assert len(group.trajectories) == len({request.seed for request in engine.requests}) == 4
        assert len({request.prefix_ids for request in engine.requests}) == num_starts
    assert {request.prefix_ids[0] // 100 for request in engine.requests} == {1, 2}, "several traces take turns"


def test_a_replayed_row_takes_the_place_of_one_rollout_and_keeps_what_was_recorded(grader: GraderPool) -> None:
    _, (earlier,) = _collect(grader, [_task("a", "7")], starts={})
    # A reward that grading would not give shows that it is not graded again.
    stored = replace(earlier.trajectories[0], reward=0.75, weight_version=(2, 2))
    engine, (group,) = _collect(grader, [_task("a", "7", GOOD, replayed=stored)], step=9)
    assert len(engine.requests) == 2
    assert [row.source[0] for row in group.trajectories] == [0, 0, Source.OFF_POLICY, Source.REPLAY]
    assert group.trajectories[-1] == replace(stored, source=(Source.REPLAY,) * 2)
    assert len(group.rollouts) == 2


# ---- groups of episodes ----


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


@pytest.fixture
def episodes(grader: GraderPool):
    """The conversation's group, whose responses are episodes in `environment`, each turn `says` and the stop token."""

    def group_of(
        scoring: EpisodeScoring = EpisodeScoring(),  # noqa: B008 - frozen
        environment: type[Asking] = Asking,
        says: str = r"\boxed{7}",
        limits: Mapping[str, float] = {},
        **group: object,
    ) -> Group:
        tokenizer = _tokenizer()
        scorer = EpisodeScorer(scoring, ("calls",))
        player = EpisodePlayer(environment, ConversationEncoder(tokenizer), EpisodeLimits(**limits), scorer)
        params = SamplingParams(1.0, 200, stop_token_ids(tokenizer))
        collector = _collector(grader, group, decode=partial(decode, tokenizer), params=params, player=player)
        return collector.collect(parrot(encode_traces(tokenizer, [says])[0]), [_conversation()], 1)[0]

    return group_of


def test_rollouts_and_a_demonstration_of_many_turns_share_a_group(episodes) -> None:
    group = episodes()
    between = ConversationEncoder(_tokenizer()).between([Message("user", "7")])
    turn = tuple(encode_traces(_tokenizer(), [r"\boxed{7}"])[0])
    for row in group.trajectories[:3]:
        assert row.response_ids == turn + between + turn
        own = (Source.ON_POLICY,) * len(turn)
        assert row.source == own + (Source.ENVIRONMENT,) * len(between) + own
        assert row.num_learnable == 2 * len(turn)
        assert row.measures == {"calls": 1.0, "turns": 2.0}
        assert row.weight_version == (6,) * len(turn) + (-1,) * len(between) + (6,) * len(turn)
    (trace,), demonstration = _conversation().demonstrations, group.trajectories[3]
    assert (demonstration.response_ids, demonstration.source) == (trace.token_ids, trace.source)
    assert demonstration.outcome is Outcome.CORRECT
    assert [row.is_off_policy for row in group.trajectories] == [False, False, False, True]


@pytest.mark.parametrize("share", [0.1, 0.45, 0.55, 0.7])
def test_a_prefix_never_ends_within_an_observation(share: float, episodes) -> None:
    row = episodes(**prefixes(share)).trajectories[3]
    between = ConversationEncoder(_tokenizer()).between([Message("user", "7")])
    observed = [token for token, who in zip(row.response_ids, row.source, strict=True) if who is Source.ENVIRONMENT]
    assert tuple(observed[: len(between)]) == between
    num_given = len(row.source) - row.source[::-1].index(Source.OFF_POLICY)
    assert row.response_ids[:num_given] == _conversation().demonstrations[0].token_ids[:num_given]
    assert row.source[-1] is Source.ON_POLICY


class Broken(Asking):
    """Fails in all of its episodes, or in the first alone."""

    def __init__(self, number: int = 0) -> None:
        self._fails = number == 0

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if self._fails:
            raise RuntimeError("a server is down")
        return None


class CrashesOnTheTrace(Asking):
    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if conversation[-1].content == r"\boxed{8}":
            raise RuntimeError("the tool of this demonstration is gone")
        return await super().respond(conversation)


class Endless(Asking):
    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        return [Message("user", "7")]


SEVEN, EIGHT = r"\boxed{7}", r"\boxed{8}"
PLAIN, PENALISED = EpisodeScoring(), EpisodeScoring(weights={"answer": 2.0, "turns": -0.25})
CALLS_COST = EpisodeScoring(weights={"answer": 1.0, "calls": -0.5})


@pytest.mark.parametrize(
    ("scoring", "environment", "says", "limits", "group", "rewards", "num_failed"),
    [
        # A failed episode is a crash and not a wrong answer: there, its reward of 0 would have been the best one.
        (PLAIN, Broken, SEVEN, {"max_failed_share": 1.0}, {"size": 2, "starts": {}}, [], 2),
        (CALLS_COST, None, EIGHT, {"max_failed_share": 0.25}, {}, [-0.5, -0.5, 0.5], 1),
        (PENALISED, CrashesOnTheTrace, SEVEN, {"max_failed_share": 0.25}, {}, [1.5] * 3, 1),
        # A demonstration is played again to be measured, for its own turns alone.
        (PENALISED, Asking, SEVEN, {}, {}, [1.5] * 4, 0),
        (PENALISED, Endless, EIGHT, {"max_turns": 4}, {"size": 2}, [-1.0, 1.5], 0),
    ],
)
def test_rewards_of_episodes_and_of_a_demonstration(
    episodes, scoring, environment, says, limits, group, rewards, num_failed
):
    played = itertools.count()
    found = episodes(scoring, environment or (lambda: Broken(next(played))), says, limits, **group)
    assert [row.reward for row in found.trajectories] == rewards
    failures = [(row.outcome, row.finish_reason) for row in found.failed]
    assert failures == [(Outcome.CRASHED, FinishReason.ENVIRONMENT_ERROR)] * num_failed
    assert kept_groups([found], None, 1) == ([found] if rewards else []) and found.is_learnable == bool(rewards)
    trace = _conversation().demonstrations[0].token_ids
    is_lost = environment is CrashesOnTheTrace
    assert [row.response_ids for row in found.trajectories[-1:] if row.is_off_policy] == [trace] * (
        bool(rewards) and not is_lost
    )
    assert not is_lost or ([row.response_ids for row in found.failed] == [trace] and not found.failed_rollouts)
    if rewards:
        shard, mean = one_shard([found], MEAN), sum(rewards) / len(rewards)
        assert shard.rows == found.trajectories, "a failed row is in no update, and in no denominator"
        assert shard.advantages == pytest.approx([reward - mean for reward in rewards])


@pytest.mark.parametrize("group", [{}, traces(when={"accuracy_at_most": 0.0})])
def test_the_share_of_failures_is_that_of_all_episodes_of_the_step(group: dict[str, object], episodes) -> None:
    """The fallback plays a single trace, whose failure is one of nine and not one of one."""
    crashing = partial(episodes, PENALISED, CrashesOnTheTrace, r"3 + 4 = \boxed{8}", size=8, **group)
    assert len(crashing({"max_failed_share": 0.13}).failed) == 1
    if group:
        assert len(crashing({"max_failed_share": 0.12}).failed) == 1
    else:
        with pytest.raises(EnvironmentFault, match="failed in 1 of 8 episodes"):
            crashing({"max_failed_share": 0.12})


# ---- stop texts ----

PIECES = {5: "x", 6: r"\boxed{7}", 7: "</answer>", 8: r"\boxed{8}", 9: r"\boxed{8}</ans", 10: "wer>ever after"}
"""What the tokens say to the decoder of the tests of stop texts; the last two only together say where to stop."""


def _stopped(grader: GraderPool, task: RolloutTask, said: Sequence[int], **group: object) -> tuple[Parrot, Group]:
    stops = StopTexts(("</answer>",), lambda ids: "".join(PIECES.get(i, "?") for i in ids))
    params, engine = SamplingParams(1.0, 8, (), stop=stops.texts), parrot(said)
    collector = _collector(grader, {"size": 2, **group}, decode=stops.text, params=params, stops=stops)
    return engine, collector.collect(engine, [task], step=1)[0]


@pytest.mark.parametrize(("answer", "said"), [("7", (6, 7, 8, 8)), ("8", (9, 10, 6, 6))])
def test_a_rollout_is_learned_from_up_to_its_stop_text_and_graded_up_to_there(answer, said, grader):
    """What the policy says after it, another answer, counts for nothing."""
    _, group = _stopped(grader, _task("a", answer), said, starts={})
    for row in group.trajectories:
        assert (row.response_ids, row.logp_behavior, row.weight_version) == (said[:2], (-0.5, -0.25), (6, 6))
        assert row.finish_reason is FinishReason.STOP and not row.is_truncated
        assert row.is_correct


def test_a_prefix_leaves_its_stop_text_to_the_policy(grader: GraderPool) -> None:
    """All but the last token of the trace would be given: that much lies behind its stop text."""
    task = _task("a", "7", _trace(5, 6, 7, 3, 3, text=r"\boxed{7}</answer>"))
    engine, group = _stopped(grader, task, (7, 8, 8, 8), **prefixes({"kind": "uniform", "low": 0.9, "high": 1.0}))
    assert engine.requests[-1].prefix_ids == (5, 6)
    row = group.trajectories[-1]
    assert row.response_ids == (5, 6, 7)
    assert row.source == (Source.OFF_POLICY, Source.OFF_POLICY, Source.ON_POLICY)
    assert row.is_correct


# ---- rewards ----


def test_overlong_rows_are_punished_as_in_equation_13_and_demonstrations_are_not(grader: GraderPool) -> None:
    """arXiv 2503.14476: 0 up to L_max - L_cache, then (L_max - L_cache - |y|) / L_cache, at L_max -1."""
    overlong = OverlongConfig(buffer_tokens=4096)
    for length in (1, 16383, 16384, 16385, 18000, 20479, 20480):
        expected = 0.0 if length <= 20480 - 4096 else ((20480 - 4096) - length) / 4096
        assert overlong.punishment(length, 20480) == expected
    assert OverlongConfig(buffer_tokens=4, penalty=0.5).punishment(99, 8) == -0.5
    said = [(RIGHT, *[5] * n, END) for n in (1, 5)]
    collector = _collector(grader, {"size": 3}, overlong=OverlongConfig(buffer_tokens=4))
    (group,) = collector.collect(parrot(*said), [_task("a", "7", _trace(8, 9, text=r"\boxed{7}" + "x" * 9))], 1)
    assert [(row.reward, row.outcome) for row in group.trajectories] == [
        (reward, Outcome.CORRECT) for reward in (1.0, 0.25, 1.0)
    ]


def test_the_number_of_tokens_is_a_measure_of_every_response(episodes) -> None:
    kind = WeightedGrader.model_validate_json(
        '{"kind": "weighted", "parts": [{"weight": 1, "grader": "math"},'
        ' {"weight": -0.125, "grader": {"kind": "measure", "name": "tokens"}}]}'
    )
    with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
        collector = _collector(grader, {"size": 1, "starts": {}})
        (group,) = collector.collect(parrot((RIGHT, 5, END)), [_task("a", "7")], 1)
    assert [row.reward for row in group.trajectories] == [1 - 3 / 8]
    episode = episodes(EpisodeScoring(weights={"tokens": 1.0})).trajectories[0]
    assert episode.reward == episode.num_learnable and not episode.measures.keys() & {"tokens"}


# ---- a reward function of the user's that fails gives no reward: 0 would train the policy on its faults ----

OWN = CustomGrader(function="broken_reward:score", correct_from=0.5)
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    if "9" in solution_str:
        {fault}
    return 1.0 if ground_truth in solution_str else 0.25
"""
NINE = r"\boxed{9}"
FAULTS = ("return None", "return float('nan')", "return 'good'", "raise ValueError('no 9 here')")


@pytest.fixture
def graded(tmp_path, monkeypatch):
    """The group of a prompt with these responses, graded by a `kind` where the function has this fault."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")  # where the workers' Python looks

    def group_of(kind: object, *texts: str, fault: str = FAULTS[0]) -> Group:
        (tmp_path / "broken_reward.py").write_text(SCORE.format(fault=fault))
        engine = parrot(*((place, END) for place in range(len(texts))))
        with GraderPool(1, PATIENCE_S, GradingConfig(kind=kind)) as grader:
            collector = _collector(grader, {"size": len(texts), "starts": {}}, decode=lambda ids: texts[ids[0]])
            return collector.collect(engine, [_task("p", "7")], 1)[0]

    return group_of


@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_whose_function_fails_is_in_no_baseline_and_no_update(graded, fault):
    group = graded(OWN, SEVEN, EIGHT, NINE, fault=fault)
    assert group.rewards == [1.0, 0.25]
    (failed,) = group.failed
    assert (failed.outcome, failed.finish_reason, failed.reward) == (Outcome.CRASHED, FinishReason.GRADER_ERROR, 0.0)


WEIGHTED = (WeightedPart(weight=1, grader=OWN), WeightedPart(weight=2, grader=MathGrader()))
COMBINED = [
    (AnyGrader(of=(MathGrader(), OWN)), [1.0, 0.25]),
    (BothGrader(of=(OWN, MathGrader())), [1.0, 0.0]),
    (WeightedGrader(parts=WEIGHTED), [3, 0.25]),
]


@pytest.mark.parametrize(("kind", "rewards"), COMBINED)
def test_a_combination_that_the_function_could_decide_has_no_reward_either(graded, kind, rewards):
    group = graded(kind, SEVEN, EIGHT, NINE)
    assert group.rewards == rewards and len(group.failed) == 1


def test_a_function_that_fails_for_most_responses_ends_the_stage_in_one_line(graded):
    with refused("3 of 4", "broken_reward:score raised ValueError: no 9 here", error=ConfigError):
        graded(OWN, NINE, EIGHT, NINE, NINE, fault=FAULTS[-1])
