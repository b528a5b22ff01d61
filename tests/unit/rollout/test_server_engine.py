"""`ServerEngine` against small HTTP servers that answer as vLLM does, or as broken, foreign and mistaken ones do."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from support.patience import PATIENCE_S
from synthetic import endpoint
from synthetic.endpoint import Endpoint
from synthetic.settings import SMOKE

from luffy.config import load_experiment
from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.server_engine import ServerEngine, check_servers
from luffy.types import FinishReason

KEY = "secret"
CONTEXT = 64
PARAMS = SamplingParams(0.7, max_response_tokens=8, stop_token_ids=(4,))
GENERATE = "/inference/v1/generate"
SETTINGS = {
    "dtype": "float32", "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "device": "cpu",
    "chunked_prefill": False,
}  # fmt: skip
Reply = tuple[int, object]


@dataclass
class FakeServer:
    """A server in a thread. It records what it is asked, and answers by `replies` before it answers as vLLM does."""

    context: int = CONTEXT
    settings: Mapping[str, object] = field(default_factory=lambda: dict(SETTINGS))
    loaded: list[str] = field(default_factory=list)
    """Parameters that the next load will not find."""
    replies: dict[str, list[Callable[[], Reply | None]]] = field(default_factory=dict)
    """Of a path, in order; the last one stays. None: hang up."""
    asked: list[tuple[str, dict]] = field(default_factory=list)
    version: str = "default"
    url: str = ""

    def reply(self, path: str, body: dict | None, key: str | None) -> endpoint.Reply | None:
        found = self.answer(urlsplit(path).path, body or {}, key)
        return found and endpoint.Reply(*found)

    def answer(self, path: str, body: dict, key: str | None) -> Reply | None:
        self.asked.append((path, body))
        if path.startswith(("/v1", "/inference")) and key != f"Bearer {KEY}":
            return 401, {"error": "Unauthorized"}
        scripted = self.replies.get(path, [])
        if scripted:
            return (scripted.pop(0) if len(scripted) > 1 else scripted[0])()
        return self._as_vllm(path, body)

    def _as_vllm(self, path: str, body: dict) -> Reply:
        match path:
            case "/v1/models":
                return 200, {"data": [{"id": "model", "max_model_len": self.context}]}
            case "/collective_rpc":
                results = {"luffy_settings": self.settings, "luffy_difference": None, "luffy_load": self.loaded}
                return 200, {"results": [results[body["method"]]]}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {}
            case "/inference/v1/generate" if not body:
                return 422, {"detail": "field required"}
            case "/inference/v1/generate":
                return 200, completion(body, self.version)
        return 200, {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def generated(self) -> list[dict]:
        return [body for path, body in self.asked if path == GENERATE and body]


def completion(body: dict, *versions: str) -> dict:
    """One token for each version; the first one is the seed."""
    tokens = [body["sampling_params"]["seed"], *range(1, len(versions))]
    named = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(versions)]
    logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]}
    choice = {"token_ids": tokens, "finish_reason": "length", "weight_versions": named, "logprobs": logprobs}
    return {"choices": [choice]}


@pytest.fixture
def start(serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeServer]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def start_one(**settings: object) -> FakeServer:
        served, fake = serve(), FakeServer(**settings)  # type: ignore[arg-type]
        served._reply = fake.reply  # type: ignore[method-assign]
        fake.url = served.url
        return fake

    return start_one


@pytest.fixture
def fake(start: Callable[..., FakeServer]) -> FakeServer:
    return start()


@pytest.fixture
def connect() -> Iterator[Callable[..., ServerEngine]]:
    engines: list[ServerEngine] = []

    def engine_on(*servers: FakeServer, **settings: object) -> ServerEngine:
        config = ServerConfig.model_validate({"urls": tuple(server.url for server in servers), **settings})
        engines.append(ServerEngine.connect(config, "float32", max_model_len=CONTEXT, weight_version=3))
        return engines[-1]

    yield engine_on
    for engine in engines:
        engine.close()


def rows(num_prompts: int, each: int) -> list[RolloutRequest]:
    return [RolloutRequest((1, prompt), seed=10 * prompt + i) for prompt in range(num_prompts) for i in range(each)]


def complaint(url: str, **settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        check_servers(ServerConfig.model_validate({"urls": (url,), **settings}), "float32", CONTEXT)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_completions_come_in_the_order_of_the_requests_with_the_version_of_each_token(fake, connect):
    completions = connect(fake).generate(rows(4, 3), PARAMS)
    assert [c.token_ids for c in completions] == [(10 * prompt + i,) for prompt in range(4) for i in range(3)]
    assert {(c.logprobs, c.finish_reason, c.weight_versions) for c in completions} == {
        ((-0.5,), FinishReason.LENGTH, (3,))
    }


def test_a_request_says_all_that_shapes_the_draw_and_no_more(fake, connect):
    connect(fake).generate([RolloutRequest((1, 2), seed=5, prefix_ids=(7, 8, 9))], PARAMS)
    (body,) = fake.generated()
    del body["cache_salt"]
    assert body == {
        "token_ids": [1, 2, 7, 8, 9],
        "sampling_params": {
            "temperature": 0.7, "top_p": 1.0, "seed": 5, "max_tokens": 5, "stop_token_ids": [4], "ignore_eos": True,
            "logprobs": 0, "detokenize": False, "skip_special_tokens": False,
        },
    }  # fmt: skip


def test_servers_share_the_rows_and_each_prompt_stays_together(start, connect):
    servers = [start() for _ in range(3)]
    connect(*servers).generate(rows(6, 4), PARAMS)
    prompts = [{tuple(body["token_ids"]) for body in server.generated()} for server in servers]
    assert [len(server.generated()) for server in servers] == [8, 8, 8]
    assert [len(of_server) for of_server in prompts] == [2, 2, 2]


def test_no_more_requests_run_at_a_server_than_it_may_have(fake, connect):
    running, most, lock, three_run = 0, 0, threading.Lock(), threading.Barrier(3)

    def slow() -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three_run.wait(PATIENCE_S)
        with lock:
            running -= 1
        return 200, completion({"sampling_params": {"seed": 1}}, fake.version)

    engine = connect(fake, concurrency=3)
    fake.replies[GENERATE] = [slow]
    engine.generate(rows(5, 3), PARAMS)
    assert most == 3


@pytest.mark.parametrize(
    ("reply", "attempts", "message"),
    [
        ((400, {"error": {"message": "too\n long"}}), 1, "status 400: too long"),
        ((404, b"?"), 1, "status 404"),
        ((500, {"error": {"message": "engine dead"}}), 3, "status 500: engine dead"),
        (None, 3, "no answer"),
    ],
)
def test_a_failure_that_stays_names_the_server_and_its_words(fake, connect, reply, attempts, message):
    engine = connect(fake, max_retries=2)
    fake.replies[GENERATE] = [lambda: reply]
    with pytest.raises(ClusterError, match=message) as caught:
        engine.generate(rows(1, 1), PARAMS)
    assert str(caught.value).startswith(fake.url)
    assert len(fake.generated()) == attempts
    assert isinstance(caught.value, LostError) == (attempts > 1)  # what may pass is worth another run of the stage


@pytest.mark.parametrize(
    ("change", "message", "may_pass"),
    [
        ({"finish_reason": "abort", "logprobs": None, "token_ids": []}, "may be shutting down", True),
        ({"logprobs": None}, "incomplete .TypeError", True),
        ({"logprobs": {"content": []}}, "1 tokens, 0 log-probabilities, 1 weight versions", True),
        ({"weight_versions": [{"version": "x"}]}, "has no 'start'", False),
        ({"finish_reason": "tired", "logprobs": None}, "unexpected finish_reason 'tired'", False),
        ({"weight_versions": [{"version": 3, "start": 0, "end": 1}]}, "weights that this run did not send", False),
    ],
)
def test_an_answer_that_cannot_be_used_is_one_line_and_the_run_retries_if_it_may_pass(
    fake, connect, change, message, may_pass
):
    engine = connect(fake)
    answer = completion({"sampling_params": {"seed": 7}}, fake.version)
    answer["choices"][0] |= change
    fake.replies[GENERATE] = [lambda: (200, answer)]
    with pytest.raises(ClusterError, match=message) as caught:
        engine.generate(rows(1, 1), PARAMS)
    assert str(caught.value).startswith(fake.url) and "\n" not in str(caught.value)
    assert isinstance(caught.value, LostError) == may_pass


def test_a_response_that_does_not_come_ends_the_call_in_time_and_is_not_asked_for_again(fake, connect):
    engine, forever = connect(fake, request_timeout_s=2.0), threading.Event()
    fake.replies[GENERATE] = [lambda: (200, {"waited": forever.wait(PATIENCE_S)})]
    with pytest.raises(ClusterError, match=r"no answer within 2 s"):
        engine.generate(rows(1, 1), PARAMS)
    assert len(fake.generated()) == 1
    forever.set()


def test_one_failure_ends_the_rows_that_still_run(fake: FakeServer, connect: Callable[..., ServerEngine]) -> None:
    engine, forever = connect(fake, concurrency=2), threading.Event()
    fake.replies[GENERATE] = [lambda: (200, {"waited": forever.wait(PATIENCE_S)}), lambda: (400, {})]
    with pytest.raises(ClusterError, match="status 400"):
        engine.generate(rows(1, 20), PARAMS)
    assert len(fake.generated()) == 2
    forever.set()


def test_tokens_of_weights_that_the_run_did_not_give_are_an_error(fake, connect):
    first, second = connect(fake), connect(fake)
    with pytest.raises(ClusterError, match="another run uses this server"):
        first.generate(rows(1, 1), PARAMS)
    run = fake.version.partition(".")[0]
    drawn = completion({"sampling_params": {"seed": 7}}, f"{run}.3", f"{run}.3", f"{run}.4")
    fake.replies[GENERATE] = [lambda: (200, drawn)]
    assert second.generate(rows(1, 1), PARAMS)[0].weight_versions == (3, 3, 4)
    fake.version, fake.replies = "default", {}
    with pytest.raises(ClusterError, match="it was restarted"):
        second.generate(rows(1, 1), PARAMS)


def test_an_update_pauses_every_server_loads_names_the_weights_and_resumes(start, connect, tmp_path):
    servers = [start() for _ in range(2)]
    engine = connect(*servers)
    engine.generate(rows(2, 2), PARAMS)
    before = {body["cache_salt"] for body in servers[0].generated()}
    for server in servers:
        server.asked.clear()
    engine.load_weights_from(tmp_path, 4)
    for server in servers:
        assert server.paths() == [
            "/collective_rpc", "/pause", "/collective_rpc", "/update_weight_version", "/resume"
        ]  # fmt: skip
        assert server.asked[2][1] == {"method": "luffy_load", "args": [str(tmp_path)]}
    assert {c.weight_versions for c in engine.generate(rows(2, 2), PARAMS)} == {(4,)}
    after = {body["cache_salt"] for body in servers[0].generated()}
    assert (len(before), len(after), before & after, engine.weight_version) == (1, 1, set(), 4)


def test_no_request_is_sent_while_the_weights_are_replaced(fake, connect):
    engine, said = connect(fake), []
    thread = threading.Thread(target=lambda: said.extend(engine.generate(rows(1, 1), PARAMS)), daemon=True)
    with engine.weight_update(4):
        thread.start()
        time.sleep(0.1)
        assert fake.generated() == []
    thread.join(PATIENCE_S)
    assert [c.weight_versions for c in said] == [(4,)]


def test_a_failed_update_leaves_no_server_paused_and_no_token_that_counts(start, connect, tmp_path):
    servers = [start(), start(loaded=["lm_head.weight"])]
    engine = connect(*servers)
    with pytest.raises(ClusterError, match=r"has no lm_head\.weight \(1 weights in all\)"):
        engine.load_weights_from(tmp_path, 4)
    assert [server.paths()[-1] for server in servers] == ["/resume", "/resume"]
    with pytest.raises(ClusterError, match="an update failed"):
        engine.generate(rows(1, 1), PARAMS)
    servers[1].loaded.clear()
    engine.load_weights_from(tmp_path, 5)
    assert engine.generate(rows(1, 1), PARAMS)[0].weight_versions == (5,)


def test_a_model_folder_of_another_model_is_refused_before_anything_is_paused(fake, connect, tmp_path):
    engine = connect(fake)
    fake.replies["/collective_rpc"] = [lambda: (200, {"results": [None, "another model: hidden_size"]})]
    with pytest.raises(ConfigError, match="another model: hidden_size"):
        engine.load_weights_from(tmp_path, 4)
    assert "/pause" not in fake.paths()


def test_a_url_that_answers_nothing_is_refused(start: Callable[..., FakeServer]) -> None:
    assert "execution.server.urls: http://127.0.0.1:1: no answer (" in complaint("http://127.0.0.1:1")
    forever = threading.Event()
    silent = start(replies={"/v1/models": [lambda: (200, {"waited": forever.wait(PATIENCE_S)})]})
    said = complaint(silent.url, request_timeout_s=0.2)
    assert "no answer within 0.2 s; start the server or correct the URL" in said
    forever.set()


def test_a_wrong_api_key_is_refused_by_the_name_of_its_variable(fake, monkeypatch):
    assert "ENGINES_KEY (execution.server.api_key_variable), which is not set" in complaint(
        fake.url, api_key_variable="ENGINES_KEY"
    )
    monkeypatch.setenv("ENGINES_KEY", "hunter2")
    said = complaint(fake.url, api_key_variable="ENGINES_KEY")
    assert "which holds a wrong one" in said and "hunter2" not in said


@pytest.mark.parametrize("reply", [(404, b"<html>"), (200, {"data": [{"id": "gpt"}]}), (200, {"data": []})])
def test_what_is_no_vllm_server_is_refused(start: Callable[..., FakeServer], reply: Reply) -> None:
    assert "this is not a vLLM server" in complaint(start(replies={"/v1/models": [lambda: reply]}).url)


UNREADABLE = (
    "--worker-extension-cls luffy.rollout.vllm_worker.ServerWorker, --dtype float32, "
    "--logprobs-mode processed_logprobs, --generation-config vllm"
)


@pytest.mark.parametrize(
    ("server", "missing"),
    [
        ({"context": 40}, "--max-model-len 64 (it has 40)"),
        ({"settings": SETTINGS | {"dtype": "bfloat16"}}, "--dtype float32"),
        ({"settings": SETTINGS | {"logprobs_mode": "raw_logprobs"}}, "--logprobs-mode processed_logprobs"),
        ({"settings": SETTINGS | {"generation_config": "auto"}}, "--generation-config vllm"),
        ({"settings": SETTINGS | {"chunked_prefill": True}}, "--no-enable-chunked-prefill"),
        ({"replies": {GENERATE: [lambda: (403, {"error": "disabled"})]}}, "--enable-scale-out"),
        (
            {"context": 40, "replies": {"/collective_rpc": [lambda: (500, {"error": "no attribute"})]}},
            f"--max-model-len 64 (it has 40), {UNREADABLE}",
        ),
        (
            {"replies": {"/collective_rpc": [lambda: (404, {})]}},
            f"VLLM_SERVER_DEV_MODE=1 in its environment, {UNREADABLE}",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_was_started_otherwise_is_told_what_to_add(start, server, missing):
    url = start(**server).url
    expected = f"{url}: start this server with {missing} (luffy serve-engine starts such servers)"
    assert complaint(url) == expected


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://a:b", "http://a:1/?x", "ftp://a", "http://k@a"])
def test_a_url_that_cannot_be_right_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"execution\.server\.urls\S* must be like http://host:8000"):
        load_experiment(SMOKE, ["evaluation.engine=openai", f"execution.server.urls=['{url}']"])


def test_urls_are_those_of_different_servers_with_or_without_what_openai_puts_below_them() -> None:
    given = ("http://a:1/", "https://a/x/v1/", "http://[::1]:8000/v1", "http://b", "https://c/openai")
    config = ServerConfig(urls=given)
    assert config.roots == ("http://a:1", "https://a/x", "http://[::1]:8000", "http://b", "https://c/openai")
    *v1, other = config.api_roots
    assert (v1, other) == ([f"{root}/v1" for root in config.roots[:4]], "https://c/openai")
