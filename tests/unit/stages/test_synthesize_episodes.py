"""The stage `synthesize` with an environment: a teacher plays, its right games become traces of many turns, and no turn
is paid for twice."""

import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from reference.gradient_case import tiny_model
from support.patience import PATIENCE_S, wait_until
from synthetic.answered_stage import contents, stage_context
from synthetic.arithmetic import ScriptedEngine
from synthetic.endpoint import Endpoint, Reply, completion, refusal
from unit.stages.test_synthesize import OUTPUTS, card_in, served

from luffy.config.answers import SynthesizeConfig
from luffy.config.data import DataConfig, GuessNumberSource
from luffy.config.environment import CustomEnvironment, EnvironmentConfig, GuessNumberEnvironment
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import SynthesizeSettings
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.row_filters import Replayed
from luffy.data.templates import load_tokenizer
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.guess_number import GuessingGame
from luffy.environments.trace_replay import EnvironmentReplayer
from luffy.errors import EnvironmentFault, LostError
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.program import StageContext
from luffy.stages.synthesis.teachers import episode_key
from luffy.stages.synthesize import run
from luffy.types import Message, Prompt
from tests.synthetic.loaded_source import load_source

GAME = GuessNumberEnvironment.model_validate({"kind": "guess_number", "limits": {"max_turns": 3, "max_turn_tokens": 8}})
SOURCE = GuessNumberSource(kind="guess_number", num_prompts=12, high=7)


def guesses(messages: Sequence[Mapping[str, str]]) -> str:
    """What a player that halves the interval from 1 to 7 says next."""
    low, high = 1, 7
    for said, answer in itertools.pairwise(messages):
        if said["role"] == "assistant":
            guess = int(said["content"])
            low, high = (guess + 1, high) if answer["content"].startswith("higher") else (low, guess - 1)
    return str((low + high) // 2)


def halving(path: str, body: dict) -> Reply:
    return completion(guesses(body["messages"]), num_tokens=2, prompt_tokens=10 * len(body["messages"]))


class Moody(GuessingGame):
    """Says otherwise what it said the first time: a tool whose results change from day to day."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        found = await super().respond(conversation)
        mood = os.environ.get("TEST_MOOD", "")
        return [replace(each, content=each.content + mood) for each in found] if found and mood else found


class Failing(GuessingGame):
    """Breaks at its first answer in the games of odd numbers."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if self._number % 2:
            raise RuntimeError("out of dice")
        return await super().respond(conversation)


@pytest.fixture
def inputs(tmp_path) -> dict[str, Path]:
    data = tmp_path / "data"
    (data / "suites").mkdir(parents=True)
    games = [replace(prompt, traces=()) for prompt in load_source(SOURCE, "train", 3).prompts]
    write_prompts(data / "train.parquet", games)
    write_prompts(data / "sft.parquet", [])
    write_prompts(data / "rl_complement.parquet", games)
    write_prompts(data / "suites" / "test.parquet", load_source(SOURCE, "test", 4).prompts[:1])
    texts = ["Game 0123456789: guess a number from 1 to 7.", "higher lower Please guess a whole number."]
    build_tokenizer(texts).save_pretrained(data / "tokenizer")
    return {"data": data}


def settings(environment: EnvironmentConfig = GAME, **changes: object) -> SynthesizeSettings:
    teacher = {"endpoint": {"name": "org/big"}, "max_response_tokens": 40, "num_samples": 1}
    data = {"suites": {"test": SOURCE}, "max_prompt_tokens": 96, "max_trace_tokens": 64, "replay_traces": "reject"}
    return SynthesizeSettings(
        seed=7,
        synthesize=SynthesizeConfig.model_validate({"teachers": {"r1": teacher}, **changes}),
        data=DataConfig.model_validate(data),
        grading=GradingConfig(),
        environment=environment,
    )


def context_in(out: Path, inputs: dict[str, Path], url: str) -> StageContext:
    server = ServerConfig(urls=(url,), max_retries=0, concurrency=4)
    execution = ExecutionConfig(teachers={"r1": server}, rollout_batch_size=4)
    return stage_context("synthesize", out, inputs, execution=execution)


def play(out: Path, inputs: dict[str, Path], played: SynthesizeSettings | None = None) -> Endpoint:
    """Run the stage with a teacher that halves the interval; returns its endpoint, with what it was asked."""
    with served(halving) as endpoint:
        run(played or settings(), context_in(out, inputs, endpoint.url))
    return endpoint


def test_the_key_of_an_episode_stays_so_that_answers_are_paid_for_once():
    prompt = Prompt("u", "d", (Message("user", "q"),), "7")
    game = GuessNumberEnvironment(kind="guess_number")
    paid = "2522a0ac848aec3728bfcf7eb0323818f9b6326260e888386fcaa64466cea9e0"
    assert episode_key("first", prompt, game) == paid
    assert episode_key("first", prompt, GAME) != paid


def test_right_games_become_traces_that_the_environment_answers_again_as_recorded(tmp_path, inputs):
    play(tmp_path / "out", inputs)
    prompts = read_prompts(tmp_path / "out" / "sft.parquet")
    assert len(prompts) == len({prompt.uid for prompt in prompts}) == 12
    for prompt in prompts:
        (trace,) = prompt.traces
        assert (trace.author, trace.verified, trace.reply) == ("r1", True, prompt.ground_truth)
        assert [turn.role for turn in trace.turns[1::2]] == ["user"] * (len(trace.turns) // 2)
    found = EnvironmentReplayer(GAME).replay(prompts)
    assert {each for of_prompt in found for each in of_prompt} == {Replayed.SAME}  # no number is the first guess
    tokenizer = load_tokenizer(inputs["data"] / "tokenizer")
    encoded = itertools.chain(*encode_demonstrations(tokenizer, prompts))
    assert any(len(set(each.source)) == 2 for each in encoded)  # the author's tokens and the environment's


def test_the_card_and_the_budget_count_every_turn(tmp_path, inputs):
    endpoint = play(tmp_path / "all", inputs)
    card = card_in(tmp_path / "all").teachers["r1"]
    assert card.num_tokens == 2 * len(endpoint.asked) > 2 * card.questions == 24
    assert card.prompt_tokens == sum(10 * len(body["messages"]) for _, body in endpoint.asked)
    limit = (card.prompt_tokens + card.num_tokens) // 2
    endpoint = play(tmp_path / "some" / "out", inputs, settings(budget={"max_tokens": limit}))
    some = card_in(tmp_path / "some" / "out").teachers["r1"]
    used = some.prompt_tokens + some.num_tokens
    assert some.questions + some.not_asked == 12
    assert limit <= used < limit + 3 * 62  # by less than one game of three turns
    assert some.num_tokens == 2 * len(endpoint.asked)


def test_a_game_that_an_outage_cut_goes_on_after_its_last_turn(tmp_path, inputs, monkeypatch):
    """Even where the environment answers otherwise today: the conversation stays as the teacher saw it."""
    asked, is_well = itertools.count(), threading.Event()
    log = tmp_path / "out" / "paid_answers.jsonl"

    def mortal(path: str, body: dict) -> Reply:
        if is_well.is_set() or next(asked) < 5:
            return halving(path, body)
        # A refusal that overtakes an answer would be its question's outcome: the endpoint answers others.
        wait_until(lambda: log.read_bytes().count(b"\n\n") >= 5, "five saved turns")
        return refusal(503, "gone")

    moody = CustomEnvironment.model_validate(
        {"kind": "custom", "factory": f"{__name__}:Moody", "limits": GAME.limits.model_dump()}
    )
    played = settings(moody)
    played = played.model_copy(update={"data": played.data.model_copy(update={"replay_traces": "off"})})
    with served(mortal) as endpoint:
        with pytest.raises(LostError):
            run(played, context_in(tmp_path / "out", inputs, endpoint.url))
        paid = saved_turns(log)
        before = len(endpoint.asked)
        is_well.set()
        monkeypatch.setenv("TEST_MOOD", "!")
        run(played, context_in(tmp_path / "out", inputs, endpoint.url))
        later = endpoint.asked[before:]
    assert paid == 5
    assert len(later) + 5 == sum(
        len(trace.turns[::2]) or 1
        for prompt in read_prompts(tmp_path / "out" / "train.parquet")
        for trace in prompt.traces
    )


def _play(out: Path, inputs: dict[str, Path], url: str) -> None:
    run(settings(), context_in(out, inputs, url))


@pytest.mark.slow
def test_kill_9_in_the_middle_of_games_pays_no_turn_twice_and_changes_nothing(tmp_path, inputs):
    reached, is_dead = threading.Event(), threading.Event()
    lock, given = threading.Lock(), Counter[int]()

    def stalling(path: str, body: dict) -> Reply | None:
        with lock:
            may_answer = is_dead.is_set() or given.total() < 13
            given[body["seed"]] += may_answer
        if may_answer:
            return halving(path, body)
        reached.set()
        is_dead.wait()
        return None

    with served(stalling) as endpoint:
        process = multiprocessing.get_context("spawn").Process(
            target=_play, args=(tmp_path / "out", inputs, endpoint.url)
        )
        process.start()
        log = tmp_path / "out" / "paid_answers.jsonl"
        assert reached.wait(PATIENCE_S)
        wait_until(lambda: saved_turns(log) == 13, "the turns in the log")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        is_dead.set()
        _play(tmp_path / "out", inputs, endpoint.url)
        assert max(given.values()) == 1
        _play(tmp_path / "other" / "out", inputs, endpoint.url)
    assert contents(tmp_path / "out", OUTPUTS) == contents(tmp_path / "other" / "out", OUTPUTS)


def saved_turns(log: Path) -> int:
    """Turns of games; the games themselves have measures."""
    lines = log.read_bytes().splitlines() if log.is_file() else []
    return sum("measures" not in json.loads(line) for line in lines if line)


def failing(max_failed_share: float) -> SynthesizeSettings:
    limits = {**GAME.limits.model_dump(), "max_failed_share": max_failed_share}
    return settings(
        CustomEnvironment.model_validate({"kind": "custom", "factory": f"{__name__}:Failing", "limits": limits})
    )


def test_a_crashed_game_is_an_outcome_with_its_reason(tmp_path, inputs):
    play(tmp_path / "out", inputs, failing(1.0))
    card = card_in(tmp_path / "out").teachers["r1"]
    odd = sum(int(prompt.ground_truth) % 2 for prompt in read_prompts(inputs["data"] / "train.parquet"))
    assert card.outcomes == {"correct": 12 - odd, "crashed": odd}
    assert "RuntimeError: out of dice" in (tmp_path / "out" / "paid_answers.jsonl").read_text()


def test_too_many_crashes_end_the_stage_and_their_turns_stay_paid(tmp_path, inputs):
    with served(halving) as endpoint:
        with pytest.raises(EnvironmentFault, match=r"failed in \d+ of 12 episodes"):
            run(failing(0.1), context_in(tmp_path / "out", inputs, endpoint.url))
        asked = len(endpoint.asked)
        with pytest.raises(EnvironmentFault):
            run(failing(0.1), context_in(tmp_path / "out", inputs, endpoint.url))
        assert len(endpoint.asked) == asked


def test_a_model_folder_plays_as_an_endpoint_does(tmp_path, inputs, monkeypatch):
    tokenizer = load_tokenizer(inputs["data"] / "tokenizer")
    folder = tmp_path / "teacher" / "model"
    tokenizer.save_pretrained(folder)
    teacher = tiny_model()
    teacher.resize_token_embeddings(len(tokenizer))
    teacher.config.max_position_embeddings = 256
    teacher.save_pretrained(folder)
    engine = ScriptedEngine(tokenizer, lambda prompt, seed: "4")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    teachers = {"own": {"path": str(folder), "max_response_tokens": 64, "num_samples": 1}}
    played = settings(teachers=teachers)
    context = context_in(tmp_path / "out", inputs, "http://127.0.0.1:9")
    run(played, replace(context, execution=ExecutionConfig(rollout_batch_size=4)))
    fours = [prompt.uid for prompt in read_prompts(inputs["data"] / "train.parquet") if prompt.ground_truth == "4"]
    assert [prompt.uid for prompt in read_prompts(tmp_path / "out" / "sft.parquet")] == fours
    card = card_in(tmp_path / "out").teachers["own"]
    assert card.outcomes["out_of_turns"] == 12 - len(fours)
    assert card.num_tokens == sum(2 * turns for turns in [1] * len(fours) + [3] * (12 - len(fours)))
