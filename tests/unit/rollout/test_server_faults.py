"""What three clients make of servers that fail: rollouts of vLLM, answers of any endpoint, scores of given tokens."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.endpoint import CHAT, TEXT, Endpoint, Reply, by_seed, refusal
from synthetic.vllm_server import CONTEXT, GENERATE, KEY, FakeServer, scoring

from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.server_engine import ServerEngine
from luffy.rollout.text_endpoint import TextEndpoint, TextRequest

PARAMS = SamplingParams(1.0, 8, ())
Said = Reply | None | Callable[[], Reply]


@dataclass(frozen=True)
class Client:
    """One of the three, and the server that it expects."""

    setting: str
    """The section of the configuration that errors name."""
    path: str
    """Of its requests."""
    server: Callable[[], Callable[[str, dict], Reply]]
    connect: Callable[[ServerConfig], Any]
    ask: Callable[[Any], object]


def _as_vllm() -> Callable[[str, dict], Reply]:
    server = FakeServer()
    return lambda path, body: server.reply(path, body, f"Bearer {KEY}")


CLIENTS = {
    "rollouts": Client(
        "execution.server", GENERATE, _as_vllm,
        lambda config: ServerEngine.connect(config, "float32", max_model_len=CONTEXT),
        lambda engine: engine.generate([RolloutRequest((1, 2), seed=7)], PARAMS),
    ),
    "texts": Client(
        "execution.server", CHAT, lambda: by_seed,
        lambda config: TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ["/chat/completions"]),
        lambda endpoint: endpoint.run(endpoint.complete(TextRequest((), 1), PARAMS)),
    ),
    "scores": Client(
        "execution.rl_teacher", TEXT, lambda: scoring,
        lambda config: ServedScorer.connect(config, "big", longest=8, known={}, setting="execution.rl_teacher"),
        lambda scorer: scorer.score([ScoreRequest((5, 9), 1)]),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", CLIENTS)


class Served:
    """A client and its server, which is good until `says` is set: requests then get these in turn; the last stays."""

    def __init__(self, client: Client, endpoint: Endpoint) -> None:
        self.client, self.endpoint = client, endpoint
        self.says: list[Said] = []
        self.num_asked = 0
        """Requests since `says` was set."""
        self.opened: list[Any] = []
        self._good = client.server()
        endpoint._reply = self._reply  # type: ignore[method-assign]

    def _reply(self, path: str, body: dict | None, key: str | None) -> Reply | None:
        if key != f"Bearer {KEY}":
            return refusal(401, f"Incorrect API key provided: {key}")
        if path == self.client.path and self.says:
            self.num_asked += 1
            said = self.says[min(self.num_asked, len(self.says)) - 1]
            if said is not GOOD:
                return said() if callable(said) else said
        return self._good(path, body or {})

    def connect(self, **config: object) -> Any:
        self.opened.append(self.client.connect(ServerConfig(urls=(self.endpoint.url,), **config)))
        return self.opened[-1]


GOOD = Reply()


@pytest.fixture
def served(name: str, serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    found = Served(CLIENTS[name], serve())
    yield found
    for client in found.opened:
        client.close()


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
        (refusal(400, f"too\n long {KEY}"), 1, (ClusterError, ConfigError, ClusterError),
         ("status 400: too long ***", "the model 'gpt-x' refuses the request: status 400: too long ***", "status 400")),
        (Reply(404, b"?"), 1, (ClusterError, ConfigError, ClusterError),
         ("status 404", "status 404: ?: no model 'gpt-x' there", "status 404")),
        (Reply(body=b"<html>"), 1, (ClusterError, LostError, ClusterError),
         ("has no 'choices'", "has no text", "has no log-probability for every token")),
        (Reply(body={"choices": []}), 1, (LostError, LostError, ClusterError),
         ("is incomplete", "has no text", "has no log-probability for every token")),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_that_names_the_server_and_its_words(name, served, reply, attempts, kinds, words):
    """`kinds` and `words`: of all, or of each client."""
    place, client = list(CLIENTS).index(name), served.connect(max_retries=2)
    kind = kinds[place] if isinstance(kinds, tuple) else kinds
    served.says = [reply]
    with pytest.raises(kind) as caught:
        served.client.ask(client)
    assert isinstance(caught.value, LostError) == (kind is LostError)
    line = str(caught.value)
    assert (words[place] if isinstance(words, tuple) else words) in line
    assert line.startswith(served.endpoint.url) and "\n" not in line and KEY not in line
    assert served.num_asked == attempts


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
def test_what_passes_is_tried_again(name, served, trouble):
    client = served.connect(max_retries=2)
    before = served.client.ask(client)
    served.says = [*trouble, GOOD]
    assert served.client.ask(client) == before
    assert served.num_asked == 3


@EACH
def test_silence_ends_the_call_in_time_and_only_a_rollout_is_not_asked_for_again(name, served):
    """Its tokens may still come, and those of other weights with them."""
    client, forever = served.connect(request_timeout_s=4.0), threading.Event()
    served.says = [lambda: Reply(body={"waited": forever.wait(PATIENCE_S)}), GOOD]
    if name == "rollouts":
        with pytest.raises(LostError, match="no answer within 4 s"):
            served.client.ask(client)
    else:
        assert served.client.ask(client)
    assert served.num_asked == (1 if name == "rollouts" else 2)
    forever.set()


@EACH
def test_a_server_that_cannot_be_used_is_refused_before_anything_is_asked(name, served, monkeypatch):
    variable = f"{served.client.setting}.api_key_variable"
    with refused("UNSET_KEY", variable, "not set", error=ConfigError):
        served.connect(api_key_variable="UNSET_KEY")
    for key, words in (
        ("sk-wrong", "which holds a"),
        ("sk hunter2", "holds no API key"),
        ("sk-hunter2\r", "holds no API key"),
        ("sk-hünter2", "holds no API key"),
    ):
        monkeypatch.setenv("OTHER_KEY", key)
        with pytest.raises(ConfigError, match=rf"OTHER_KEY \({variable}\).* {words}") as caught:
            served.connect(api_key_variable="OTHER_KEY")
        assert "nter2" not in str(caught.value) and "sk-wrong" not in str(caught.value)
    forever, reply = threading.Event(), served.endpoint._reply
    served.endpoint._reply = lambda *_: Reply(body={"waited": forever.wait(PATIENCE_S)})
    with refused(f"{served.client.setting}.urls: {served.endpoint.url}", "within 0.2 s", error=ConfigError):
        served.connect(request_timeout_s=0.2)
    forever.set()
    served.endpoint._reply = reply
    served.endpoint.close()
    with refused(f"{served.client.setting}.urls: {served.endpoint.url}", "no answer (", error=ConfigError):
        served.connect()
