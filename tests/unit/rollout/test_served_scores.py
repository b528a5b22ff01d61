"""Scores of given tokens by a served model: in order, from any number of servers, and refused in one line."""

from collections.abc import Callable
from contextlib import closing

import pytest
from synthetic.endpoint import Endpoint, Reply, refusal

from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer

PATHS = ("/v1/models", "/v1/completions", "/tokenize")
REQUESTS = [ScoreRequest((5, 6, 7), 1), ScoreRequest((5, 9), 1), ScoreRequest((8, 1, 2, 3), 3)]
SCORES = [(-0.6, -0.7), (-0.9,), (-0.3,)]


def scoring(path: str, body: dict) -> Reply:
    """A model to which token n has the log-probability -n / 10, and a text the ids of its letters."""
    if path == "/v1/models":
        return Reply(body={"data": [{"id": "small"}, {"id": "big", "max_model_len": 9}]})
    if path == "/tokenize":
        return Reply(body={"tokens": [ord(letter) for letter in body["prompt"]]})
    _, *others = body["prompt"]
    given = [None, *({str(token): {"logprob": -token / 10}} for token in others)]
    return Reply(body={"choices": [{"prompt_logprobs": given}]})


def scored(value: float) -> Reply:
    return Reply(body={"choices": [{"prompt_logprobs": [None, {"9": {"logprob": value}}]}]})


@pytest.fixture
def scorers(serve: Callable[..., Endpoint]) -> Callable[..., Endpoint]:
    return lambda answer=scoring, key=None: serve(answer, PATHS, key)


def connect(
    *servers: Endpoint, longest: int = 8, model: str = "big", text_ids: tuple[int, ...] = (97,)
) -> ServedScorer:
    config = ServerConfig(urls=tuple(server.url for server in servers), max_retries=2)
    return ServedScorer.connect(config, model, longest=longest, known={"a": text_ids}, setting="execution.rl_teacher")


@pytest.mark.parametrize(("num_servers", "num_tokens"), [(1, [9]), (2, [4, 5])])
def test_servers_share_the_sequences_by_their_tokens_and_score_those_after_the_first_in_order(
    scorers: Callable[..., Endpoint], num_servers: int, num_tokens: list[int]
) -> None:
    servers = [scorers() for _ in range(num_servers)]
    with closing(connect(*servers)) as scorer:
        assert scorer.score(REQUESTS) == SCORES
    asked = [[body for path, body in each.asked if path == "/v1/completions"] for each in servers]
    assert sorted(sum(len(body["prompt"]) for body in of_one) for of_one in asked) == num_tokens
    assert {(body["model"], body["max_tokens"], body["prompt_logprobs"]) for body in asked[0]} == {("big", 1, 0)}


def test_a_request_that_fails_for_now_is_sent_again(scorers: Callable[..., Endpoint]) -> None:
    failing = iter([True, True])

    def moody(path: str, body: dict) -> Reply:
        busy = path == "/v1/completions" and next(failing, False)
        return refusal(503, "busy") if busy else scoring(path, body)

    with closing(connect(scorers(moody))) as scorer:
        assert scorer.score(REQUESTS[:1]) == SCORES[:1]


@pytest.mark.parametrize(
    ("said", "kind", "words"),
    [
        (refusal(503, "gone"), LostError, "status 503: gone"),
        (Reply(body={"choices": [{"text": "4"}]}), ClusterError, "no log-probability for every token of the prompt"),
        (Reply(body={"choices": [{"prompt_logprobs": [None]}]}), ClusterError, "needs vLLM servers"),
        (scored(float("nan")), ClusterError, "the log-probability of a token is nan"),
        (scored(-float("inf")), ClusterError, "the log-probability of a token is -inf"),
    ],
)
def test_a_server_without_scores_ends_the_step_in_one_line(scorers, said, kind, words):
    served = scorers(lambda path, body: said if path == "/v1/completions" else scoring(path, body))
    with closing(connect(served)) as scorer, pytest.raises(kind, match=words) as found:
        scorer.score([ScoreRequest((5, 9), 1)])
    assert "\n" not in str(found.value)


def test_servers_that_cannot_score_the_policys_tokens_are_refused(scorers: Callable[..., Endpoint]) -> None:
    served, locked = scorers(), scorers(key="sesame")
    loading, gone = scorers(lambda path, body: refusal(503, "loading")), scorers()
    gone.close()
    for server, settings, words in (
        (served, {"model": "huge"}, "serves small, big, and not huge"),
        (served, {"longest": 9}, r"needs --max-model-len 10 \(it has 9\)"),
        (served, {"model": "small"}, "is not a vLLM server"),
        (served, {"text_ids": (1, 2)}, "the tokenizer of big is not the policy's"),
        (locked, {}, r"OPENAI_API_KEY \(execution.rl_teacher.api_key_variable\), which is not set"),
        (loading, {}, "^execution.rl_teacher.urls: .*/v1/models: status 503: loading; is this a vLLM"),
        (gone, {}, r"^execution.rl_teacher.urls: .* start the server or correct the URL$"),
    ):
        with pytest.raises(ConfigError, match=words):
            connect(server, **settings)
