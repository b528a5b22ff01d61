"""What two clients make of servers that fail: answers of any endpoint, scores of given tokens."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.endpoint import CHAT, TEXT, Endpoint, Reply, by_seed, refusal
from synthetic.vllm_server import GOOD, KEY, FakeServer, scoring

from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import TextEndpoint, TextRequest

PARAMS = SamplingParams(1.0, 8, ())


@dataclass(frozen=True)
class Client:
    """One of the two, and the answers that it expects."""

    setting: str
    """The section of the configuration that errors name."""
    path: str
    """Of its requests."""
    good: Callable[[str, dict], Reply]
    connect: Callable[[ServerConfig], Any]
    ask: Callable[[Any], object]


CLIENTS = {
    "texts": Client(
        "execution.server", CHAT, by_seed,
        lambda config: TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ["/chat/completions"]),
        lambda endpoint: endpoint.run(endpoint.complete(TextRequest((), 1), PARAMS)),
    ),
    "scores": Client(
        "execution.rl_teachers.big", TEXT, scoring,
        lambda config: ServedScorer.connect(config, "big", longest=8, known={}, setting="execution.rl_teachers.big"),
        lambda scorer: scorer.score([ScoreRequest((5, 9), 1)]),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CLIENTS)


@pytest.fixture
def client(name: str) -> Client:
    return CLIENTS[name]


@pytest.fixture
def endpoint(serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return serve()


@pytest.fixture
def server(client: Client, endpoint: Endpoint) -> FakeServer:
    return FakeServer(good=client.good).on(endpoint)


@pytest.fixture
def connect(client: Client, server: FakeServer) -> Iterator[Callable[..., Any]]:
    opened: list[Any] = []

    def connect_with(**config: object) -> Any:
        opened.append(client.connect(ServerConfig(urls=(server.url,), **config)))
        server.asked.clear()
        return opened[-1]

    yield connect_with
    for each in opened:
        each.close()


@EACH
@pytest.mark.parametrize(
    ("reply", "attempts", "kinds", "words"),
    [
        # What may pass later is tried again, and is worth another run of the stage.
        (refusal(500, "engine\n dead"), 3, LostError, "status 500: engine dead"),
        (None, 3, LostError, "no answer ("),
        (refusal(200, "upstream failed"), 3, LostError, "upstream failed"),
        (refusal(429, "daily limit", Retry_After="86400"), 1, LostError, "429: daily limit (Retry-After: 86400)"),
        # What cannot pass is not.
        (refusal(400, f"too\n long {KEY}"), 1, (ConfigError, ClusterError),
         ("the model 'gpt-x' refuses the request: status 400: too long ***", "status 400: too long ***")),
        (Reply(404, b"?"), 1, (ConfigError, ClusterError),
         ("status 404: ?: no model 'gpt-x' there", "status 404")),
        (Reply(body=b"<html>"), 1, (LostError, ClusterError),
         ("has no text", "has no log-probability for every token")),
        (Reply(body={"choices": []}), 1, (LostError, ClusterError),
         ("has no text", "has no log-probability for every token")),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_that_names_the_server_and_its_words(
    name, client, server, connect, reply, attempts, kinds, words
):
    """`kinds` and `words`: of all, or of each client."""
    place, opened = list(CLIENTS).index(name), connect(max_retries=2)
    kind = kinds[place] if isinstance(kinds, tuple) else kinds
    server.replies[client.path] = [reply]
    with pytest.raises(kind) as caught:
        client.ask(opened)
    assert isinstance(caught.value, LostError) == (kind is LostError)
    line = str(caught.value)
    assert (words[place] if isinstance(words, tuple) else words) in line
    assert line.startswith(server.url) and "\n" not in line and KEY not in line
    assert server.paths() == [client.path] * attempts


@EACH
@pytest.mark.parametrize(
    "trouble",
    [
        [refusal(503, "overloaded")] * 2,
        [refusal(429, "slow down", Retry_After="0")] * 2,
        [None, refusal(408, "too slow")],
        [refusal(200, "upstream failed")] * 2,
    ],
    ids=["5xx", "429", "hangs up", "200 with an error"],
)
def test_what_passes_is_tried_again(name, client, server, connect, trouble):
    opened = connect(max_retries=2)
    before = client.ask(opened)
    server.asked.clear()
    server.replies[client.path] = [*trouble, GOOD]
    assert client.ask(opened) == before
    assert server.paths() == [client.path] * 3


@EACH
def test_after_silence_the_same_is_asked_again(client, server, connect):
    opened, forever = connect(request_timeout_s=4.0), threading.Event()
    server.replies[client.path] = [lambda: Reply(body={"waited": forever.wait(PATIENCE_S)}), GOOD]
    assert client.ask(opened)
    assert len(server.asked) == 2
    forever.set()


@EACH
def test_a_server_that_cannot_be_used_is_refused_before_anything_is_asked(client, endpoint, connect, monkeypatch):
    variable = f"{client.setting}.api_key_variable"
    with refused("UNSET_KEY", variable, "not set", error=ConfigError):
        connect(api_key_variable="UNSET_KEY")
    for key, words in (
        ("sk-wrong", "which holds a"),
        ("sk hunter2", "holds no API key"),
        ("sk-hunter2\r", "holds no API key"),
        ("sk-hünter2", "holds no API key"),
    ):
        monkeypatch.setenv("OTHER_KEY", key)
        with pytest.raises(ConfigError, match=rf"OTHER_KEY \({variable}\).* {words}") as caught:
            connect(api_key_variable="OTHER_KEY")
        assert "nter2" not in str(caught.value) and "sk-wrong" not in str(caught.value)
    forever = threading.Event()
    endpoint._reply = lambda *_: Reply(body={"waited": forever.wait(PATIENCE_S)})
    with refused(f"{client.setting}.urls: {endpoint.url}", "within 0.2 s", error=ConfigError):
        connect(request_timeout_s=0.2)
    forever.set()
    endpoint.close()
    with refused(f"{client.setting}.urls: {endpoint.url}", "no answer (", error=ConfigError):
        connect()
