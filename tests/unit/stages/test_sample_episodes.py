"""The stage `sample` with teachers and an environment: right games become traces of many turns, and no turn is paid for
twice."""

import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.patience import wait_until
from synthetic.answered_stage import contents, stage_context
from synthetic.arithmetic import ScriptedEngine
from synthetic.endpoint import Endpoint, Reply, completion, refusal
from synthetic.stage_jobs import write_wide_model
from unit.stages.test_sample import card_in, served

from luffy.config.answers import SampleConfig
from luffy.config.data import DataConfig, GuessNumberSource
from luffy.config.environment import CustomEnvironment, EnvironmentConfig, GuessNumberEnvironment, MixtureEnvironment
from luffy.config.execution import ExecutionConfig, ServerConfig
from luffy.config.grading import GradingConfig
from luffy.config.settings import SampleSettings
from luffy.data.conversations import encode_demonstrations
from luffy.data.parquet import read_prompts, write_prompts
from luffy.data.templates import load_tokenizer
from luffy.data.tokenizer import build_tokenizer
from luffy.environments.guess_number import GuessingGame
from luffy.errors import EnvironmentFault, LostError
from luffy.rollout.transformers_engine import TransformersEngine
from luffy.stages.answers.paid import episode_key
from luffy.stages.sample import run
from luffy.types import Message, Prompt
from tests.synthetic.loaded_source import load_source

OUTPUTS = ("train.parquet", "sft.parquet", "rl_complement.parquet", "card.json", "card.md")
GAME = GuessNumberEnvironment.model_validate({"kind": "guess_number", "limits": {"max_turns": 3, "max_turn_tokens": 8}})
SOURCE = GuessNumberSource(kind="guess_number", num_prompts=12, high=7)
SERVED = {"r1": {"endpoint": {"name": "org/big"}, "max_response_tokens": 40, "num_samples": 1}}


def halving(path: str, body: dict) -> Reply:
    """A player that halves the interval from 1 to 7."""
    messages: Sequence[Mapping[str, str]] = body["messages"]
    low, high = 1, 7
    for said, answer in itertools.pairwise(messages):
        if said["role"] == "assistant":
            guess = int(said["content"])
            low, high = (guess + 1, high) if answer["content"].startswith("higher") else (low, guess - 1)
    return completion(str((low + high) // 2), num_tokens=2, prompt_tokens=10 * len(messages))


class Failing(GuessingGame):
    """Breaks at its first answer in the games of odd numbers."""

    async def respond(self, conversation: Sequence[Message]) -> Sequence[Message] | None:
        if self._number % 2:
            raise RuntimeError("out of dice")
        return await super().respond(conversation)


def custom(game: type[GuessingGame], **limits: object) -> CustomEnvironment:
    return CustomEnvironment.model_validate(
        {"kind": "custom", "factory": f"{__name__}:{game.__name__}", "limits": {**GAME.limits.model_dump(), **limits}}
    )


def settings(environment: EnvironmentConfig = GAME, **changes: object) -> SampleSettings:
    data = {"suites": {"test": SOURCE}, "max_prompt_tokens": 96, "max_trace_tokens": 64}
    return SampleSettings(
        seed=7,
        sample=SampleConfig.model_validate({"teachers": SERVED, **changes}),
        data=DataConfig.model_validate(data),
        grading=GradingConfig(),
        environment=environment,
    )


def play(out: Path, data: Path, url: str | None, played: SampleSettings | None = None) -> None:
    """Run the stage with a teacher at the URL, or with one in a folder."""
    teachers = {} if url is None else {"r1": ServerConfig(urls=(url,), max_retries=0, concurrency=4)}
    execution = ExecutionConfig(teachers=teachers, rollout_batch_size=4)
    run(played or settings(), stage_context("sample", out, {"data": data}, execution=execution))


def play_well(out: Path, data: Path, played: SampleSettings | None = None) -> Endpoint:
    """With a teacher that halves the interval; returns its endpoint, with what it was asked."""
    with served(halving) as endpoint:
        play(out, data, endpoint.url, played)
    return endpoint


def saved_turns(log: Path) -> int:
    """Turns of games; the games themselves have measures."""
    lines = log.read_bytes().splitlines() if log.is_file() else []
    return sum("measures" not in json.loads(line) for line in lines if line)


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    (folder / "suites").mkdir(parents=True)
    games = [replace(prompt, traces=()) for prompt in load_source(SOURCE, "train", 3).prompts]
    for name, prompts in {"train": games, "sft": [], "rl_complement": games}.items():
        write_prompts(folder / f"{name}.parquet", prompts)
    write_prompts(folder / "suites" / "test.parquet", load_source(SOURCE, "test", 4).prompts[:1])
    texts = ["Game 0123456789: guess a number from 1 to 7.", "higher lower Please guess a whole number."]
    build_tokenizer(texts).save_pretrained(folder / "tokenizer")
    return folder


def test_the_key_of_an_episode_stays_so_that_answers_are_paid_for_once():
    prompt = Prompt("u", "d", (Message("user", "q"),), "7")
    parts = {
        "game": {"environment": {"kind": "guess_number"}, "plays": ["a"]},
        "tools": {"environment": {"kind": "tools", "tools": ["calculator"]}, "plays": ["b"]},
    }
    judge = {"kind": "judge", "url": "http://h", "model": "m"}
    measures = {"style": {"kind": "judge", "rubric": "short", "judge": judge}}
    own = {"kind": "custom", "factory": "a:B", "scoring": {"measures": measures}}
    paid = {
        "2522a0ac848aec3728bfcf7eb0323818f9b6326260e888386fcaa64466cea9e0": GuessNumberEnvironment(kind="guess_number"),
        "ab6e2fb599cf7544048dfb460a874accf38fbb8288e4281c87a643f51b2bd6c8": MixtureEnvironment.model_validate_json(
            json.dumps({"kind": "mixture", "parts": parts})
        ),
        "6bbeccd4bd55cc367eb2cbdf3e48c1654f22000fa13fd5524e9fc8f76c26f51a": CustomEnvironment.model_validate_json(
            json.dumps(own)
        ),
    }
    assert [episode_key("first", prompt, environment) for environment in paid.values()] == list(paid)
    assert episode_key("first", prompt, GAME) not in paid


def test_right_games_become_traces(tmp_path, data):
    play_well(tmp_path / "out", data)
    prompts = read_prompts(tmp_path / "out" / "sft.parquet")
    assert len(prompts) == len({prompt.uid for prompt in prompts}) == 12
    for prompt in prompts:
        (trace,) = prompt.traces
        assert (trace.author, trace.verified, trace.reply) == ("r1", True, prompt.ground_truth)
        assert [turn.role for turn in trace.turns[1::2]] == ["user"] * (len(trace.turns) // 2)
    encoded = itertools.chain(*encode_demonstrations(load_tokenizer(data / "tokenizer"), prompts))
    assert any(len(set(each.source)) == 2 for each in encoded)  # the author's tokens and the environment's


def test_the_card_and_the_budget_count_every_turn(tmp_path, data, monkeypatch):
    endpoint = play_well(tmp_path / "all", data)
    card = card_in(tmp_path / "all").teachers["r1"]
    assert card.num_tokens == 2 * len(endpoint.asked) > 2 * card.questions == 24
    assert card.prompt_tokens == sum(10 * len(body["messages"]) for _, body in endpoint.asked)
    limit = (card.prompt_tokens + card.num_tokens) // 2
    monkeypatch.setattr("luffy.stages.sample.CHUNK", 2)
    endpoint = play_well(tmp_path / "some" / "out", data, settings(budget={"max_tokens": limit}))
    some = card_in(tmp_path / "some" / "out").teachers["r1"]
    assert some.questions + some.not_asked == 12
    assert limit <= some.prompt_tokens + some.num_tokens < limit + 2 * 3 * 62  # by less than two games of three turns
    assert some.num_tokens == 2 * len(endpoint.asked)


def test_a_game_that_an_outage_cut_goes_on_after_its_last_turn_and_changes_nothing(tmp_path, data):
    asked, is_well, out = itertools.count(), threading.Event(), tmp_path / "out"
    log = out / "paid_answers.jsonl"

    def mortal(path: str, body: dict) -> Reply:
        if is_well.is_set() or next(asked) < 5:
            return halving(path, body)
        # A refusal that overtakes an answer would be its question's outcome: the endpoint answers others.
        wait_until(lambda: log.read_bytes().count(b"\n\n") >= 5, "five saved turns")
        return refusal(503, "gone")

    with served(mortal) as endpoint:
        with pytest.raises(LostError):
            play(out, data, endpoint.url)
        assert saved_turns(log) == 5
        before = len(endpoint.asked)
        is_well.set()
        play(out, data, endpoint.url)
        later = len(endpoint.asked) - before
    traces = [trace for prompt in read_prompts(out / "train.parquet") for trace in prompt.traces]
    assert later + 5 == sum(len(trace.turns[::2]) or 1 for trace in traces)
    play_well(tmp_path / "other" / "out", data)
    assert contents(out, OUTPUTS) == contents(tmp_path / "other" / "out", OUTPUTS)


def test_a_crashed_game_is_an_outcome_and_too_many_end_the_stage_while_their_turns_stay_paid(tmp_path, data):
    play_well(tmp_path / "out", data, settings(custom(Failing, max_failed_share=1.0)))
    odd = sum(int(prompt.ground_truth) % 2 for prompt in read_prompts(data / "train.parquet"))
    assert card_in(tmp_path / "out").teachers["r1"].outcomes == {"correct": 12 - odd, "crashed": odd}
    assert "RuntimeError: out of dice" in (tmp_path / "out" / "answers.jsonl").read_text()
    strict, out = settings(custom(Failing, max_failed_share=0.1)), tmp_path / "other" / "out"
    with served(halving) as endpoint:
        paid = []
        for _ in range(2):
            with pytest.raises(EnvironmentFault, match=r"failed in \d+ of 12 episodes"):
                play(out, data, endpoint.url, strict)
            paid.append(len(endpoint.asked))
    assert paid[0] == paid[1] > 0


def test_a_model_folder_plays_as_an_endpoint_does(tmp_path, data, monkeypatch):
    tokenizer = load_tokenizer(data / "tokenizer")
    write_wide_model(tmp_path / "teacher", 0, tokenizer, 256)
    engine = ScriptedEngine(tokenizer, lambda prompt, seed: "4")
    monkeypatch.setattr(TransformersEngine, "from_folder", lambda folder, dtype, batch_size: engine)
    own = {"path": str(tmp_path / "teacher"), "max_response_tokens": 64, "num_samples": 1}
    play(tmp_path / "out", data, None, settings(teachers={"own": own}))
    fours = [prompt.uid for prompt in read_prompts(data / "train.parquet") if prompt.ground_truth == "4"]
    assert [prompt.uid for prompt in read_prompts(tmp_path / "out" / "sft.parquet")] == fours
    card = card_in(tmp_path / "out").teachers["own"]
    assert card.outcomes["out_of_turns"] == 12 - len(fours)
    assert card.num_tokens == sum(2 * turns for turns in [1] * len(fours) + [3] * (12 - len(fours)))
