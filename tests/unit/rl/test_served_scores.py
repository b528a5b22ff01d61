"""Scores of given tokens from small HTTP servers that answer as vLLM does, or as mistaken ones do."""

from collections.abc import Callable
from contextlib import closing

import pytest
from support.refusals import refused
from synthetic.endpoint import TEXT, Endpoint, Reply, refusal
from synthetic.vllm_server import SCORING_PATHS, scoring

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer

REQUESTS = [ScoreRequest((5, 6, 7), 1), ScoreRequest((5, 9), 1), ScoreRequest((8, 1, 2, 3), 3)]
SCORES = [(-0.6, -0.7), (-0.9,), (-0.3,)]


def scorer(*servers: Endpoint, longest: int = 8, model: str = "big", text_ids: tuple[int, ...] = (97,)) -> ServedScorer:
    config = ServerConfig(urls=tuple(server.url for server in servers))
    return ServedScorer.connect(
        config, model, longest=longest, known={"a": text_ids}, setting="execution.rl_teachers.big"
    )


@pytest.mark.parametrize(("num_servers", "num_tokens"), [(1, [9]), (2, [4, 5])])
def test_servers_share_the_sequences_by_their_tokens_and_score_those_after_the_first_in_order(
    serve: Callable[..., Endpoint], num_servers: int, num_tokens: list[int]
) -> None:
    servers = [serve(scoring, SCORING_PATHS) for _ in range(num_servers)]
    with closing(scorer(*servers)) as opened:
        assert opened.score(REQUESTS) == SCORES
    asked = [[body for path, body in each.asked if path == TEXT] for each in servers]
    assert sorted(sum(len(body["prompt"]) for body in of_one) for of_one in asked) == num_tokens
    assert {(body["model"], body["max_tokens"], body["prompt_logprobs"]) for body in asked[0]} == {("big", 1, 0)}


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"text": "4"}, "no log-probability for every token of the prompt"),
        ({"prompt_logprobs": [None]}, "needs vLLM servers"),
        ({"prompt_logprobs": [None, {"9": {"logprob": float("nan")}}]}, "the log-probability of a token is nan"),
        ({"prompt_logprobs": [None, {"9": {"logprob": -float("inf")}}]}, "the log-probability of a token is -inf"),
    ],
)
def test_a_server_without_scores_ends_the_step_in_one_line(serve, choice, words):
    said = Reply(body={"choices": [choice]})
    served = serve(lambda path, body: said if path == TEXT else scoring(path, body), SCORING_PATHS)
    with closing(scorer(served)) as opened, pytest.raises(ClusterError, match=words) as found:
        opened.score([ScoreRequest((5, 9), 1)])
    assert "\n" not in str(found.value) and not isinstance(found.value, LostError)


@pytest.mark.parametrize(
    ("answer", "settings", "named"),
    [
        (scoring, {"model": "huge"}, ("serves small, big", "huge")),
        (scoring, {"longest": 9}, ("--max-model-len 10 (it has 9)",)),
        (scoring, {"model": "small"}, ("is not a vLLM server",)),
        (scoring, {"text_ids": (1, 2)}, ("the tokenizer of big is not the policy's",)),
        (
            lambda *_: refusal(503, "loading"),
            {},
            ("execution.rl_teachers.big.urls: ", "/v1/models: status 503: loading"),
        ),
    ],
)
def test_servers_that_cannot_score_the_policys_tokens_are_refused(serve, answer, settings, named):
    with refused(*named, error=ConfigError):
        scorer(serve(answer, SCORING_PATHS), **settings)
