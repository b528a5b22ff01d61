"""Episodes: turns of a scripted policy and of environments token by token, and of a model that answers with text."""

import asyncio
import copy
import functools
import re
import threading
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import PATIENCE_S
from synthetic.endpoint import CHAT, completion

from luffy.config.environment import EpisodeLimits, EpisodeScoring, GuessNumberEnvironment, ToolsEnvironment
from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.data.conversations import ConversationEncoder
from luffy.data.templates import decode, encode_traces, stop_token_ids
from luffy.data.tokenizer import EOS, build_tokenizer
from luffy.environments.episodes import Context, EpisodePlayer, Observation
from luffy.environments.limits import FailedShare, with_time_limit
from luffy.environments.live_episode import EpisodeStart
from luffy.environments.registry import open_text_player
from luffy.environments.rubric import EpisodeScorer
from luffy.environments.transcript import transcript, turns_of
from luffy.errors import DataError, EnvironmentFault, LostError, LuffyError
from luffy.grading.judge import Judges
from luffy.grading.request import Grade, Problem
from luffy.rl.rows import Row
from luffy.rollout.engine import Completion, SamplingParams, limit, room
from luffy.rollout.text_endpoint import TextEndpoint
from luffy.rollout.vllm_limits import check_lengths
from luffy.stages.answers.paid import PaidEndpoint
from luffy.stages.answers.store import AnswerStore
from luffy.types import FinishReason, Message, Outcome, Source

SCORER = EpisodeScorer(EpisodeScoring(), ())
PROMPT = (Message("user", "Begin."),)
START = EpisodeStart(Problem(), "7", PROMPT, (5, 6), seed=3)
FAILED, STOP, LENGTH = FinishReason.ENVIRONMENT_ERROR, FinishReason.STOP, FinishReason.LENGTH
TURNS, TURN_LENGTH = FinishReason.TURNS, FinishReason.TURN_LENGTH
EVERY_HISTORY = pytest.mark.parametrize("history", ["exact", "branching"])


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(["Begin. turn 0 turn 1 turn 2 said go on higher lower"] * 4)


class Scripted:
    """A policy whose n-th turn of an episode is `turns[n]`, with the stop token; it remembers its calls."""

    def __init__(self, tokenizer, turns):
        self.calls = []
        self._written = [tuple(ids) for ids in encode_traces(tokenizer, turns)]
        self._stop = stop_token_ids(tokenizer)[0]

    def generate(self, requests, params):
        self.calls.append(list(requests))
        return [self._completion(request, limit(request, params)) for request in requests]

    @property
    def requests(self):
        return [request for call in self.calls for request in call]

    def _turn(self, request):
        return request.prefix_ids.count(self._stop)

    def _completion(self, request, limit):
        ids = self._written[self._turn(request)][:limit]
        reason = STOP if ids[-1] == self._stop else LENGTH
        return Completion(ids, (-0.5,) * len(ids), reason, (2,) * len(ids))


class Thinking(Scripted):
    """Says its n-th turn in the n-th call."""

    def _turn(self, request):
        return len(self.calls) - 1


REPEATS = object()


def found(given):
    if isinstance(given, BaseException):
        raise given
    return given


class Echo:
    """Answers `num_answers` turns by repeating them, or as it is told to, and remembers what it saw.

    An exception is raised instead of returned.
    """

    def __init__(self, num_answers=1, wait=lambda: None, opening=(), answer=REPEATS, counts=None, end=lambda: None):
        self.left, self.seen, self.is_closed = num_answers, [], False
        self._wait, self._opening, self._answer, self._counts, self._end = wait, opening, answer, counts, end

    async def reset(self, problem):
        return found(self._opening)

    async def respond(self, conversation):
        self.seen.append(tuple(conversation))
        await asyncio.get_running_loop().run_in_executor(None, self._wait)
        self.left -= 1
        repeated = [Message("user", f"said {conversation[-1].content}")]
        answer = repeated if self._answer is REPEATS else found(self._answer)
        return answer if self.left >= 0 else None

    def counts(self):
        return {"answers": float(len(self.seen))} if self._counts is None else self._counts

    async def close(self):
        self._end()
        self.is_closed = True


def play_all(tokenizer, environments, turns, starts=(), lanes=0, history="exact", policy=Scripted, **settings):
    """The episodes, and the policy; an environment may be a function that makes it."""
    engine, left = policy(tokenizer, turns), iter(environments)
    scorer, max_tokens = settings.pop("scorer", SCORER), settings.pop("max_tokens", 200)

    def make():
        environment = next(left)
        return environment() if callable(environment) else environment

    player = EpisodePlayer(make, ConversationEncoder(tokenizer, history), EpisodeLimits(**settings), scorer, lanes)
    params = SamplingParams(1.0, max_tokens, stop_token_ids(tokenizer))
    return player.play(starts or [START] * len(environments), engine, params), engine


def play(tokenizer, environment, turns, start=START, **settings):
    (episode,), engine = play_all(tokenizer, [environment], turns, [start], **settings)
    return episode, engine


def row_of(episode, prompt_ids=None):
    return Row(prompt_ids or episode.prompt_ids).played(episode).trajectory(Grade(Outcome.CORRECT), 1.0)


def ids_of(episode):
    return tuple(token for segment in episode.segments for token in segment.token_ids)


@pytest.mark.parametrize("lanes", [0, 2])
def test_each_turn_extends_the_ids_of_all_before_it(tokenizer, lanes):
    environment = Echo(num_answers=2)
    episode, engine = play(tokenizer, environment, ["turn 0", "turn 1", "turn 2"], lanes=lanes)
    prefixes = [request.prefix_ids for request in engine.requests]
    assert len(prefixes) == 3
    assert all(ids_of(episode)[: len(prefix)] == prefix for prefix in prefixes)
    assert [type(segment) for segment in episode.segments] == [Completion, Observation] * 2 + [Completion]
    seeds = [request.seed for request in engine.requests]
    assert seeds[0] == START.seed and len({*seeds}) == 3, "turns have random numbers of their own"
    assert (episode.finish_reason, episode.measures) == (STOP, {"answers": 3.0, "turns": 3.0})
    assert environment.is_closed
    assert [message.content for message in environment.seen[-1]] == [
        "Begin.", "turn 0", "said turn 0", "turn 1", "said turn 1", "turn 2",
    ]  # fmt: skip


FORGETFUL = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "<|eos|>{% endfor %}{% if add_generation_prompt %}assistant\n{% endif %}"
)
"""Drops the reasoning of earlier turns."""
PARAMS = SamplingParams(1.0, 400, ())
THOUGHTS = ["<think>higher</think>turn 0", "<think>lower</think>turn 1", "<think>go</think>turn 2"]


def branching(tokenizer, max_tokens=400):
    forgetful = copy.deepcopy(tokenizer)
    forgetful.chat_template = FORGETFUL
    start = EpisodeStart(Problem(), "7", PROMPT, ConversationEncoder(forgetful, "branching").prompt(PROMPT), seed=3)
    return play(forgetful, Echo(2), THOUGHTS, start, max_tokens=max_tokens, history="branching", policy=Thinking)


def test_turns_are_sampled_and_learned_under_what_the_template_makes_of_earlier_ones(tokenizer):
    episode, engine = branching(tokenizer)
    row = row_of(episode)
    branches = row.branches()
    seen = [request.prompt_ids + request.prefix_ids for request in engine.requests]
    assert [branch.prompt_ids for branch in branches] == seen
    check_lengths(engine.requests, PARAMS, len(episode.prompt_ids) + 400)
    rooms = [room(request, PARAMS) for request in engine.requests]
    assert rooms == [400 - len(ids) + len(episode.prompt_ids) for ids in seen]
    assert decode(tokenizer, branches[2].prompt_ids) == (
        "user\nBegin.<|eos|>assistant\nturn 0<|eos|>user\nsaid <think>higher</think>turn 0<|eos|>"
        "assistant\nturn 1<|eos|>user\nsaid <think>lower</think>turn 1<|eos|>assistant\n"
    )
    assert [decode(tokenizer, branch.response_ids) for branch in branches] == THOUGHTS
    assert sum(len(each.token_ids) for each in episode.segments if isinstance(each, Completion)) == row.num_learnable
    assert all({*branch.source} == {Source.ON_POLICY} for branch in branches)
    assert sum(branch.num_tokens for branch in branches) == row.num_tokens
    # A transcript shows a context from where it differs.
    text_of = functools.partial(decode, tokenizer)
    shown = transcript(row.response_ids, row.source, text_of, row.prompt_ids, row.context_starts)
    assert [who for who, _ in turns_of(shown)] == ["policy", "environment"] * 2 + ["policy"]
    assert shown.count("Begin.") == 0  # the prompt, which every context repeats
    assert shown.count("<think>higher") == 2  # as it was sampled, and in the environment's answer
    assert turns_of("7 --- policy ---") == [("", "7 --- policy ---")], "no transcript"


def test_the_limit_of_a_response_holds_for_each_context(tokenizer):
    whole, _ = branching(tokenizer)
    branches = row_of(whole).branches()
    longest = max(branch.num_tokens for branch in branches) - len(whole.prompt_ids)
    assert branching(tokenizer, longest)[0].finish_reason is STOP
    cut, _ = branching(tokenizer, longest - 1)
    assert cut.finish_reason is LENGTH
    assert cut.segments[-1].token_ids == whole.segments[-1].token_ids[:-1]
    early, _ = branching(tokenizer, len(branches[0].response_ids) + 1)
    assert (early.finish_reason, len(early.segments)) == (LENGTH, 1)


def recorded(tokenizer, is_whole=False):
    """Two turns with an answer between them."""
    encoder = ConversationEncoder(tokenizer)
    trace = encoder.trace([Message("assistant", "turn 0"), Message("user", "go on"), Message("assistant", "turn 1")])
    return EpisodeStart(Problem(), "7", PROMPT, (5, 6), 3, trace.token_ids, trace.source, is_whole=is_whole)


def test_the_finish_reason_names_the_bound(tokenizer):
    for num_answers, limits, max_tokens, reason in (
        (9, {"max_turns": 2}, 200, TURNS),
        (1, {"max_turns": 2}, 200, STOP),  # the last turn is accepted
        (9, {"max_turn_tokens": 1}, 200, TURN_LENGTH),
        (9, {}, 1, LENGTH),
        (9, {}, 8, LENGTH),  # room for the first turn, none for an answer
    ):
        episode, _ = play(tokenizer, Echo(num_answers), ["turn 0"] * 9, max_tokens=max_tokens, **limits)
        assert episode.finish_reason is reason, (num_answers, limits, max_tokens)
        assert isinstance(episode.segments[-1], Completion)
        assert len(ids_of(episode)) <= max_tokens


@given(st.lists(st.text("turn 0123 said", min_size=1, max_size=12), min_size=1, max_size=5), st.integers(1, 120))
def test_an_episode_ends_with_a_token_of_the_policy_and_keeps_its_budget(turns, max_tokens):
    tokenizer = build_tokenizer(["turn 0 said"] * 4)
    episode, engine = play(tokenizer, Echo(len(turns) - 1), turns, max_tokens=max_tokens)
    assert isinstance(episode.segments[-1], Completion)
    assert len(ids_of(episode)) <= max_tokens
    sampled = [segment for segment in episode.segments if isinstance(segment, Completion)]
    assert len(sampled) == len(engine.requests) == episode.measures["turns"]


def test_a_recorded_episode_is_measured_and_goes_on_only_where_it_may(tokenizer):
    for num_answers, is_whole, max_turns, reason, num_sampled in (
        (1, False, 9, STOP, 0),
        (9, False, 3, TURNS, 1),  # the given turns count
        (9, False, 2, TURNS, 0),
        # What the policy would write after it is no part of the demonstration, nor is its reward.
        (9, True, 9, TURNS, 0),
    ):
        start, turns = recorded(tokenizer, is_whole), ["-", "-", "turn 2", "turn 3"]
        episode, engine = play(tokenizer, Echo(num_answers), turns, start, max_turns=max_turns)
        assert (episode.finish_reason, len(engine.calls)) == (reason, num_sampled), (num_answers, is_whole, max_turns)
        assert num_sampled or episode.segments == ()
        assert episode.measures == {"answers": 2.0 + num_sampled, "turns": 2.0 + num_sampled}


def test_a_recorded_start_is_replayed_into_the_environment_and_a_turn_that_was_begun_finished(tokenizer):
    """Its first turn and observation stand; the second turn is answered by the live environment."""
    start, environment = recorded(tokenizer), Echo(num_answers=2)
    episode, engine = play(tokenizer, environment, ["-", "-", "turn 2"], start)
    assert [conversation[-1].content for conversation in environment.seen] == ["turn 0", "turn 1", "turn 2"]
    live = ConversationEncoder(tokenizer).between([Message("user", "said turn 1")])
    assert episode.segments[0] == Observation(live)
    assert engine.calls[0][0].prefix_ids == start.given_ids + live
    assert episode.measures["turns"] == 3
    begun = tuple(encode_traces(tokenizer, ["go on"])[0][:-1])
    start = EpisodeStart(Problem(), "7", PROMPT, (5, 6), 3, begun, (Source.OFF_POLICY,) * len(begun))
    environment = Echo(num_answers=0)
    play(tokenizer, environment, [" higher"], start)
    assert environment.seen[0][-1].content == "go on higher"


@EVERY_HISTORY
def test_a_long_observation_is_the_same_cut_text_for_policy_measures_and_traces(tokenizer, history):
    """A demonstration made from the episode holds the tokens that the policy saw, and no others."""
    limits = {"max_tokens": 2000, "max_observation_tokens": 20}
    episode, _ = play(tokenizer, Echo(1), ["turn 0 " * 40, "turn 1"], history=history, **limits)
    written, observed, _ = episode.completion
    whole = f"said {written.content}"
    start, end = re.split(r" \.\.\. \[\d+ tokens left out\] \.\.\. ", observed.content)
    assert whole.startswith(start) and whole.endswith(end) and len(observed.content) < len(whole)
    trace = ConversationEncoder(tokenizer, history).trace(episode.completion, PROMPT)
    assert trace.token_ids == ids_of(episode)


OPENING = Message("user", "go on higher lower")


@EVERY_HISTORY
def test_what_reset_adds_counts_towards_the_limit_of_the_response_and_is_plain_text(tokenizer, history):
    """An engine's context has room for the data's longest prompt and a whole response, and for nothing else."""
    encoder, turns, num_stops = ConversationEncoder(tokenizer, history), ["turn 0", "turn 1", "turn 2"], []
    bare, opened = encoder.prompt(PROMPT), encoder.prompt([*PROMPT, OPENING])
    start = EpisodeStart(Problem(), "7", PROMPT, bare, seed=3)
    for max_tokens in range(20, 80, 6):
        environment = Echo(2, opening=[OPENING])
        episode, engine = play(tokenizer, environment, turns, start, max_tokens=max_tokens, history=history)
        check_lengths(engine.requests, SamplingParams(1.0, max_tokens, ()), len(bare) + max_tokens)
        branches = row_of(episode, bare).branches()
        assert all(branch.num_tokens <= len(bare) + max_tokens for branch in branches)
        if len(opened) - len(bare) >= max_tokens:
            assert (episode.finish_reason, episode.segments, engine.calls) == (LENGTH, (), [])
            assert episode.prompt_ids == bare
        else:
            assert engine.requests[0].prompt_ids == episode.prompt_ids == opened
    for opening in (OPENING, Message("user", f"go{EOS}on")):  # the text of the stop token is no stop token
        episode, _ = play(tokenizer, Echo(1, opening=[opening]), turns[:2], start, history=history)
        parts = [episode.prompt_ids, *(segment.token_ids for segment in episode.segments)]
        num_stops.append([list(ids).count(tokenizer.eos_token_id) for ids in parts])
    assert EOS in decode(tokenizer, episode.prompt_ids[len(bare) :])
    assert num_stops[0] == num_stops[1]
    assert any(isinstance(segment, Context) for segment in episode.segments) == (history == "branching")


NO_LIST = "and has to return a list of messages"
RELEASED = threading.Event()


@pytest.fixture(scope="module", autouse=True)
def released():
    """Ends the call that hangs after the tests."""
    yield
    RELEASED.set()


def no_port():
    raise OSError("no port is free")


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        (Echo(answer=RuntimeError("a bug")), "RuntimeError: a bug"),
        (Echo(answer=SystemExit("usage: ...")), "SystemExit: usage: ..."),
        (Echo(answer=asyncio.CancelledError()), "CancelledError"),
        (Echo(opening=None), f"TypeError: reset returned None, {NO_LIST}"),
        (Echo(answer="go on"), f"TypeError: respond returned 'go on', {NO_LIST}"),
        (Echo(answer={"role": "user", "content": "go on"}), NO_LIST),
        (Echo(answer=[]), "TypeError: respond returned no message; None says that the episode is over"),
        (Echo(answer=[7]), "TypeError: respond returned 7 among its messages"),
        (Echo(answer=[Message("user", 7)]), "content=7), whose role and content have to be text"),
        (Echo(answer=[{"role": "user"}]), "respond returned the message {'role': 'user'}, whose role and content"),
        (Echo(answer=[Message("assistant", "turn 1")]), "role assistant, which is the policy's own"),
        (Echo(counts=[1.0]), "TypeError: counts returned [1.0], and has to return numbers by name"),
        (Echo(counts={"score": float("nan")}), "count score is nan, which is no finite number"),
        (Echo(counts={"score": None}), "count score is None, which is no finite number"),
        (no_port, "OSError: no port is free"),
        # In a thread, which hangs on.
        (with_time_limit(Echo(1, wait=RELEASED.wait), 0.05), "LateCall: respond did not end within 0.05 s"),
    ],
)
def test_a_bug_ends_its_own_episode(tokenizer, environment, fault):
    """However few others there are: how many may fail is counted over the step or the suite."""
    (bad, good), _ = play_all(tokenizer, [environment, Echo()], ["turn 0", "turn 1"], max_failed_share=0.0)
    assert (bad.finish_reason, good.finish_reason) == (FAILED, STOP)
    assert fault in bad.fault
    assert environment is not no_port or bad.measures == {"turns": 0.0}
    assert getattr(environment, "is_closed", True)


def test_the_share_of_failures_is_that_of_all_batches_and_no_single_early_one_ends_the_stage(tokenizer):
    share = FailedShare(EpisodeLimits(max_failed_share=0.1))
    share.add([True, False])
    share.add([True] * 2 + [False] * 28)
    share.add([True] * 3 + [False] * 25)
    with pytest.raises(EnvironmentFault, match=r"failed in 7 of 61 episodes .* a share of 0\.1"):
        share.add([True])
    with pytest.raises(EnvironmentFault, match="failed in 1 of 1 episodes"):
        FailedShare(EpisodeLimits(max_failed_share=0.0)).add([True])
    # A weighted count that is gone at the end is a failure of its own episode.
    scorer = EpisodeScorer(EpisodeScoring(weights={"answer": 1.0, "bonus": 0.1}), ("bonus",))
    episode, _ = play(tokenizer, Echo(0), ["turn 0"], scorer=scorer)
    assert episode.fault == "TypeError: counts returned no bonus, which environment.scoring.weights names"


def test_mappings_are_messages_and_numbers_of_numpy_are_numbers(tokenizer):
    answer = [{"role": "user", "content": "go\x00on \ud83d"}]
    counts = {"half": np.float32(0.5), "one": np.int64(1), "yes": np.bool_(True)}
    episode, _ = play(tokenizer, Echo(answer=answer, counts=counts), ["turn 0", "turn 1"])
    assert episode.completion[1] == Message("user", "go\ufffdon \ufffd")
    assert episode.measures == {"half": 0.5, "one": 1.0, "yes": 1.0, "turns": 2.0}
    assert {type(value) for value in episode.measures.values()} == {float}


@pytest.mark.parametrize("lanes", [0, 2])
@pytest.mark.parametrize(
    ("environment", "policy", "error"),
    [
        (Echo(opening=DataError("the problem has no number")), Scripted, DataError),  # the user has to mend it
        (Echo(answer=LostError("http://tool: no answer")), Scripted, LostError),
        (Echo(), lambda *_: SimpleNamespace(generate=lambda *_: found(LuffyError("it broke"))), LuffyError),
    ],
)
def test_what_no_other_episode_would_survive_is_raised_and_closes_all(tokenizer, lanes, environment, policy, error):
    made = [copy.copy(environment) for _ in range(5)]
    with pytest.raises(error, match=r"has no number|no answer|it broke"):
        play_all(tokenizer, made, ["turn 0", "turn 1"], lanes=lanes, policy=policy)
    assert all(each.is_closed for each in made)


def test_in_lockstep_a_call_has_all_turns_in_order_and_with_lanes_a_slow_tool_holds_up_its_episode(tokenizer):
    first_answered, over = threading.Event(), threading.Event()
    slow, quick = Echo(1, wait=lambda: first_answered.wait(PATIENCE_S)), Echo(1, wait=first_answered.set)
    starts = [EpisodeStart(Problem(), "7", PROMPT, (seed,), seed) for seed in (1, 2)]
    _, engine = play_all(tokenizer, [slow, quick], ["turn 0", "turn 1"], starts)
    assert [[request.prompt_ids for request in call] for call in engine.calls] == [[(1,), (2,)], [(1,), (2,)]]
    # The slow tool answers only when the other episode is over.
    made = [Echo(1, wait=lambda: over.wait(PATIENCE_S)), Echo(3, end=over.set)]
    episodes, _ = play_all(tokenizer, made, [f"turn {number}" for number in range(4)], lanes=2)
    assert over.is_set()
    assert [episode.measures["turns"] for episode in episodes] == [2.0, 4.0]


# ---- in text, over HTTP: the rules of episodes without token ids ----


def halving(path, body):
    """Binary search from 1 to 7, with some reasoning before each guess."""
    low, high = 1, 7
    for guess, answer in zip(body["messages"][2::2], body["messages"][3::2], strict=True):
        number = int(guess["content"])
        low, high = (number + 1, high) if answer["content"] == "higher" else (low, number - 1)
    return completion(f"<think>between {low} and {high}</think>{(low + high) // 2}")


@pytest.fixture
def play_text(tmp_path, serve):
    """The episodes with an endpoint that answers so, and what that was asked."""

    def run(answer, starts, max_tokens=64, environment=None, store="paid", **limits):
        served = serve(answer if callable(answer) else lambda path, body: answer, (CHAT,))
        config = ServerConfig(urls=(served.url,), max_retries=0)
        endpoint = TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ("/chat/completions",))
        paid = PaidEndpoint(endpoint, AnswerStore(tmp_path / store))
        guessing = GuessNumberEnvironment(kind="guess_number", limits=EpisodeLimits(**limits))
        player = open_text_player(environment or guessing, Judges(None))
        with closing(endpoint):
            return player.play(starts, paid, SamplingParams(1.0, max_tokens, ())), served.asked

    return run


def game(number, seed=3):
    prompt = (Message("system", "Play."), Message("user", "Guess a number from 1 to 7."))
    return EpisodeStart(Problem(extra_info={"number": number}), str(number), prompt, (), seed)


def test_a_game_is_played_in_text_and_measured_and_a_long_observation_is_cut_by_characters(play_text):
    (found, quick), asked = play_text(halving, [game(7), game(4)])
    assert found.finish_reason is STOP
    assert found.measures == {"found": 1.0, "guesses": 3.0, "turns_without_guess": 0.0, "turns": 3.0}
    assert found.num_tokens == 3 * 7  # as `completion` counts
    assert [turn.content for turn in found.completion[1::2]] == ["higher", "higher"]
    assert quick.measures["turns"] == 1.0
    longest = max((body["messages"] for _, body in asked), key=len)
    assert [turn["role"] for turn in longest] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert longest[2]["content"] == "4"  # earlier turns go without their reasoning
    (episode,), _ = play_text(completion("five?"), [game(4, 5)], max_turns=2, max_observation_tokens=3)
    assert episode.completion[1].content == "Please ... [16 characters left out] ... umber."


def test_bounds_end_an_episode_with_their_reason_and_turns_have_seeds_of_their_own(play_text):
    cut_off = completion("4", "length")
    for answer, limits, max_tokens, reason, num_turns, asked_for in (
        (halving, {}, 64, STOP, 3, 64),
        (halving, {"max_turns": 2}, 64, TURNS, 2, 64),
        (halving, {}, 2 * 7, LENGTH, 2, 2 * 7),
        # A turn that was cut gets no answer.
        (cut_off, {"max_turn_tokens": 5}, 30, TURN_LENGTH, 1, 5),
        (cut_off, {}, 30, LENGTH, 1, 30),
    ):
        starts, store = [game(7 if answer is halving else 4)], f"{reason} {max_tokens}"
        (episode,), asked = play_text(answer, starts, max_tokens, store=store, **limits)
        assert (episode.finish_reason, episode.measures["turns"]) == (reason, num_turns), (limits, max_tokens)
        assert episode.completion[-1].role == "assistant"
        assert (asked[0][1]["max_tokens"], episode.measures["found"]) == (asked_for, float(reason is STOP))
        seeds = [body["seed"] for _, body in asked]
        assert seeds[0] == 3 and len({*seeds}) == num_turns


def test_tools_are_called_in_the_environments_own_format(play_text):
    def calling(path, body):
        said = body["messages"][-1]["content"]
        call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "17*23"}}\n</tool_call>'
        return completion(f"\\boxed{{{said.split()[1]}}}" if "tool_response" in said else call)

    tools = ToolsEnvironment(kind="tools", tools=("calculator",))
    (episode,), _ = play_text(calling, [game(1)], environment=tools)
    assert episode.completion[-1].content == "\\boxed{391}"
    assert episode.measures["tool_calls/calculator"] == 1.0
