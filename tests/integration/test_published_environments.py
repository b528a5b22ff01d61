"""Published environments of verifiers score an episode here as in their own evaluation.

`LUFFY_TEST_VERIFIERS` names an interpreter with verifiers, reasoning-gym and textarena. `PYTHONPATH` has the modules
of the environments, from the folder `environments/` of verifiers' own repository.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from support.nltk_words import write_words
from support.patience import ran

from luffy.config.data import VerifiersSource
from luffy.config.environment import VerifiersEnvironment
from luffy.data.sources import open_source
from luffy.environments.registry import instructions_of, open_environment
from luffy.grading.request import problem_of
from luffy.types import Message, Prompt

PYTHON = os.environ.get("LUFFY_TEST_VERIFIERS")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="needs verifiers: name its interpreter in LUFFY_TEST_VERIFIERS"),
]
REFERENCE = Path(__file__).parents[1] / "synthetic" / "verifiers_evaluation.py"
Turns = Sequence[Message]


@pytest.fixture(autouse=True)
def ended(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr("luffy.hosted.verifiers_process._shared", shared := {})
    yield
    for process in shared.values():
        process.close()


def prompts_of(environment: str, arguments: Mapping[str, object], split: str = "train") -> list[Prompt]:
    source = VerifiersSource(
        kind="verifiers", environment=environment, arguments=arguments, python=PYTHON, split=split, num_prompts=4
    )
    return list(open_source(source, "train", 0).rows())


def scores_here(config: VerifiersEnvironment, prompt: Prompt, turns: Sequence[str]) -> dict[str, float]:
    environment = open_environment(config)()

    async def play() -> None:
        conversation = [*prompt.messages, *await environment.reset(problem_of(prompt))]
        for turn in turns:
            conversation.append(Message("assistant", turn))
            answer = await environment.respond(tuple(conversation))
            conversation += answer or ()
        assert answer is None
        await environment.score(tuple(conversation))
        await environment.close()

    asyncio.run(play())
    return dict(environment.counts())


def own_evaluation(
    environment: str, arguments: Mapping[str, object], cases: Sequence[Mapping[str, object]]
) -> list[dict[str, float]]:
    asked = json.dumps({"environment": environment, "arguments": arguments, "cases": cases})
    result = ran([PYTHON, REFERENCE], input=asked + "\n", env={"PYTHONHASHSEED": "0", **os.environ})
    assert result.returncode == 0, result.stderr
    return [{"reward": found["reward"], **found["metrics"]} for found in json.loads(result.stdout)]


def case(prompt: Prompt, *turns: Mapping[str, object]) -> dict[str, object]:
    place = prompt.extra_info["verifiers_task"]
    return {"split": place["split"], "row": place["row"], "turns": turns}


def said(*texts: str) -> list[dict[str, object]]:
    return [{"content": text} for text in texts]


def test_a_single_turn_of_reasoning_gym():
    arguments = {"gym": "chain_sum", "num_train_examples": 4, "num_eval_examples": 2}
    config = VerifiersEnvironment(kind="verifiers", environment="reasoning_gym_env", arguments=arguments, python=PYTHON)
    prompts = prompts_of("reasoning_gym_env", arguments)
    sums = [eval(prompt.messages[-1].content.split(":")[-1].strip(" =.")) for prompt in prompts]
    texts = [f"<answer>{sums[0]}</answer>", f"<answer>{sums[1] + 1}</answer>", f"It is {sums[2]}", "<answer>?</answer>"]
    here = [scores_here(config, prompt, [text]) for prompt, text in zip(prompts, texts, strict=True)]
    theirs = own_evaluation(
        "reasoning_gym_env", arguments, [case(prompt, *said(text)) for prompt, text in zip(prompts, texts, strict=True)]
    )
    assert here == theirs
    assert [scores["reward"] for scores in here][:2] == [1.0, 0.0]


@pytest.fixture
def words(tmp_path, monkeypatch) -> None:
    write_words(tmp_path)
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))


def test_a_game_of_several_turns(words):
    arguments = {"num_train_examples": 4, "num_eval_examples": 2}
    config = VerifiersEnvironment(kind="verifiers", environment="wordle", arguments=arguments, python=PYTHON)
    prompts = prompts_of("wordle", arguments, "eval")
    games = [
        ["<guess>[crane]</guess>", f"<guess>[{prompts[0].ground_truth}]</guess>"],
        ["I pass.", *["<guess>[house]</guess>"] * 6],
    ]
    played = [scores_here_until_over(config, prompt, turns) for prompt, turns in zip(prompts, games, strict=True)]
    theirs = own_evaluation(
        "wordle", arguments, [case(prompt, *said(*turns)) for prompt, turns in zip(prompts, games, strict=True)]
    )
    assert played == theirs
    assert played[0]["correct_answer"] == 1.0 and played[0]["num_turns"] == 2.0


def scores_here_until_over(config: VerifiersEnvironment, prompt: Prompt, turns: Sequence[str]) -> dict[str, float]:
    """As `scores_here`, where the environment may end before the last turn."""
    for count in range(1, len(turns) + 1):
        try:
            return scores_here(config, prompt, turns[:count])
        except AssertionError:
            continue
    raise AssertionError("the game goes on")


def test_calls_of_tools():
    """The tasks of tool-test are drawn without a seed: the host gives every process the same ones."""
    arguments = {"num_train_examples": 4, "num_eval_examples": 2}
    config = VerifiersEnvironment(kind="verifiers", environment="tool-test", arguments=arguments, python=PYTHON)
    prompts = prompts_of("tool-test", arguments)
    assert "tool_A" in instructions_of(config)
    values = {"tool_A": 1, "tool_B": "b", "tool_C": 1.5, "tool_D": True}
    wanted = [prompt.extra_info["info"]["tool_names"] for prompt in prompts]
    called = [wanted[0], wanted[1][:-1], [*wanted[2], "tool_A"], []]

    def written(name: str) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'x': values[name]}})}\n</tool_call>"

    def requested(numbered: tuple[int, str]) -> dict[str, object]:
        place, name = numbered
        function = {"name": name, "arguments": json.dumps({"x": values[name]})}
        return {"id": f"call_{place}", "type": "function", "function": function}

    texts = ["\n".join(map(written, names)) or "No." for names in called]
    turns = [
        {"content": None if names else "No.", "tool_calls": [*map(requested, enumerate(names))] or None}
        for names in called
    ]
    here = [scores_here(config, prompt, [text]) for prompt, text in zip(prompts, texts, strict=True)]
    theirs = own_evaluation("tool-test", arguments, [case(p, turn) for p, turn in zip(prompts, turns, strict=True)])
    assert here == theirs
    assert [scores["reward"] for scores in here][:3:2] == [1.0, 0.0]
