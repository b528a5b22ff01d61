"""Rollouts and scores of vLLM servers, from small HTTP servers that answer as vLLM does, or as mistaken ones do."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.endpoint import TEXT, Endpoint, Reply, refusal
from synthetic.settings import SMOKE
from synthetic.vllm_server import CONTEXT, GENERATE, KEY, SCORING_PATHS, SETTINGS, FakeServer, sampled, scoring

from luffy.config import load_experiment
from luffy.config.execution import ServerConfig
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer
from luffy.rollout.engine import RolloutRequest, SamplingParams
from luffy.rollout.server_engine import ServerEngine, check_servers
from luffy.types import FinishReason

PARAMS = SamplingParams(0.7, max_response_tokens=8, stop_token_ids=(4,))
Start = Callable[..., FakeServer]
Connect = Callable[..., ServerEngine]


@pytest.fixture
def start(serve: Callable[..., Endpoint], monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    return lambda **settings: FakeServer(**settings).on(serve())


@pytest.fixture
def fake(start: Start) -> FakeServer:
    return start()


@pytest.fixture
def connect() -> Iterator[Connect]:
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


ONE = rows(1, 1)


def test_completions_come_in_the_order_of_the_requests_with_the_version_of_each_token(fake, connect):
    completions = connect(fake).generate(rows(4, 3), PARAMS)
    assert [c.token_ids for c in completions] == [(10 * prompt + i,) for prompt in range(4) for i in range(3)]
    assert {(c.logprobs, c.finish_reason, c.weight_versions) for c in completions} == {
        ((-0.5,), FinishReason.LENGTH, (3,))
    }


def test_a_request_says_all_that_shapes_the_draw_and_no_more(fake: FakeServer, connect: Connect) -> None:
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


def test_servers_share_the_rows_and_each_prompt_stays_together(start: Start, connect: Connect) -> None:
    servers = [start() for _ in range(3)]
    connect(*servers).generate(rows(6, 4), PARAMS)
    for server in servers:
        assert len(server.generated()) == 8
        assert len({tuple(body["token_ids"]) for body in server.generated()}) == 2


def test_no_more_requests_run_at_a_server_than_it_may_have(fake: FakeServer, connect: Connect) -> None:
    running, most, lock, three_run = 0, 0, threading.Lock(), threading.Barrier(3)

    def slow() -> Reply:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three_run.wait(PATIENCE_S)
        with lock:
            running -= 1
        return sampled(1, fake.version)

    engine = connect(fake, concurrency=3)
    fake.replies[GENERATE] = [slow]
    engine.generate(rows(5, 3), PARAMS)
    assert most == 3


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
    fake.replies[GENERATE] = [sampled(7, fake.version, **change)]
    with pytest.raises(ClusterError, match=message) as caught:
        engine.generate(ONE, PARAMS)
    assert str(caught.value).startswith(fake.url) and "\n" not in str(caught.value)
    assert isinstance(caught.value, LostError) == may_pass


def test_one_failure_ends_the_rows_that_still_run(fake: FakeServer, connect: Connect) -> None:
    engine, forever = connect(fake, concurrency=2), threading.Event()
    fake.replies[GENERATE] = [lambda: Reply(body={"waited": forever.wait(PATIENCE_S)}), Reply(400, {})]
    with pytest.raises(ClusterError, match="status 400"):
        engine.generate(rows(1, 20), PARAMS)
    assert len(fake.generated()) == 2
    forever.set()


def test_tokens_of_weights_that_the_run_did_not_give_are_an_error(fake: FakeServer, connect: Connect) -> None:
    first, second = connect(fake), connect(fake)
    with pytest.raises(ClusterError, match="another run uses this server"):
        first.generate(ONE, PARAMS)
    run = fake.version.partition(".")[0]
    fake.replies[GENERATE] = [sampled(7, f"{run}.3", f"{run}.3", f"{run}.4")]
    assert second.generate(ONE, PARAMS)[0].weight_versions == (3, 3, 4)
    fake.version, fake.replies = "default", {}
    with pytest.raises(ClusterError, match="it was restarted"):
        second.generate(ONE, PARAMS)


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


def test_no_request_is_sent_while_the_weights_are_replaced(fake: FakeServer, connect: Connect) -> None:
    engine, said = connect(fake), []
    thread = threading.Thread(target=lambda: said.extend(engine.generate(ONE, PARAMS)), daemon=True)
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
        engine.generate(ONE, PARAMS)
    servers[1].loaded.clear()
    engine.load_weights_from(tmp_path, 5)
    assert engine.generate(ONE, PARAMS)[0].weight_versions == (5,)


def test_a_model_folder_of_another_model_is_refused_before_anything_is_paused(fake, connect, tmp_path):
    engine = connect(fake)
    fake.replies["/collective_rpc"] = [Reply(body={"results": [None, "another model: hidden_size"]})]
    with refused("another model: hidden_size", error=ConfigError):
        engine.load_weights_from(tmp_path, 4)
    assert "/pause" not in fake.paths()


def answers(path: str, status: int, body: object) -> dict[str, object]:
    return {"replies": {path: [Reply(status, body)]}}


UNREADABLE = (
    "--worker-extension-cls luffy.rollout.vllm_worker.ServerWorker, --dtype float32, "
    "--logprobs-mode processed_logprobs, --generation-config vllm"
)
RPC, MODELS = "/collective_rpc", "/v1/models"


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (answers(MODELS, 404, b"<html>"), "this is not a vLLM server"),
        (answers(MODELS, 200, {"data": [{"id": "gpt"}]}), "this is not a vLLM server"),
        (answers(MODELS, 200, {"data": []}), "this is not a vLLM server"),
        # A server that was started otherwise is told what to add.
        ({"context": 40}, "with --max-model-len 64 (it has 40) ("),
        ({"settings": SETTINGS | {"dtype": "bfloat16"}}, "with --dtype float32 ("),
        ({"settings": SETTINGS | {"logprobs_mode": "raw_logprobs"}}, "with --logprobs-mode processed_logprobs ("),
        ({"settings": SETTINGS | {"generation_config": "auto"}}, "with --generation-config vllm ("),
        ({"settings": SETTINGS | {"chunked_prefill": True}}, "with --no-enable-chunked-prefill ("),
        (answers(GENERATE, 403, {"error": "disabled"}), "with --enable-scale-out ("),
        ({"context": 40, **answers(RPC, 500, {"error": "no attribute"})},
         f"with --max-model-len 64 (it has 40), {UNREADABLE} ("),
        (answers(RPC, 404, {}), f"with VLLM_SERVER_DEV_MODE=1 in its environment, {UNREADABLE} ("),
    ],
)  # fmt: skip
def test_a_server_that_this_engine_cannot_use_is_refused(start, server, words):
    url = start(**server).url
    with refused(url, words, error=ConfigError):
        check_servers(ServerConfig(urls=(url,)), "float32", CONTEXT)


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "http://a:b", "http://a:1/?x", "ftp://a", "http://k@a"])
def test_a_url_that_cannot_be_right_is_refused(url: str) -> None:
    with refused("execution.server.urls", "http://host:8000", error=ConfigError):
        load_experiment(SMOKE, ["evaluation.engine=openai", f"execution.server.urls=['{url}']"])


def test_urls_are_those_of_different_servers_with_or_without_what_openai_puts_below_them() -> None:
    given = ("http://a:1/", "https://a/x/v1/", "http://[::1]:8000/v1", "http://b", "https://c/openai")
    config = ServerConfig(urls=given)
    assert config.roots == ("http://a:1", "https://a/x", "http://[::1]:8000", "http://b", "https://c/openai")
    *v1, other = config.api_roots
    assert (v1, other) == ([f"{root}/v1" for root in config.roots[:4]], "https://c/openai")


# ---- scores of given tokens ----

REQUESTS = [ScoreRequest((5, 6, 7), 1), ScoreRequest((5, 9), 1), ScoreRequest((8, 1, 2, 3), 3)]
SCORES = [(-0.6, -0.7), (-0.9,), (-0.3,)]


def scorer(*servers: Endpoint, longest: int = 8, model: str = "big", text_ids: tuple[int, ...] = (97,)) -> ServedScorer:
    config = ServerConfig(urls=tuple(server.url for server in servers))
    return ServedScorer.connect(config, model, longest=longest, known={"a": text_ids}, setting="execution.rl_teacher")


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
        (lambda *_: refusal(503, "loading"), {}, ("execution.rl_teacher.urls: ", "/v1/models: status 503: loading")),
    ],
)
def test_servers_that_cannot_score_the_policys_tokens_are_refused(serve, answer, settings, named):
    with refused(*named, error=ConfigError):
        scorer(serve(answer, SCORING_PATHS), **settings)
