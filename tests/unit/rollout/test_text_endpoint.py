"""`TextEndpoint`, whose answers are saved, against small HTTP servers that answer as OpenAI's protocol wants it, or as
some servers do; what it and the scorer of served teachers make of servers that fail."""

import email.utils
import itertools
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE_S
from support.refusals import refused
from synthetic.endpoint import CHAT, TEXT, Reply, by_seed, completion, refusal, text_completion
from synthetic.settings import SMOKE
from synthetic.vllm_server import SCORING_PATHS, scoring

from luffy.config import load_experiment
from luffy.config.execution import ServerConfig
from luffy.config.model import EndpointModel
from luffy.errors import ClusterError, ConfigError, LostError
from luffy.rl.teaching import ScoreRequest, ServedScorer
from luffy.rollout.engine import SamplingParams
from luffy.rollout.text_endpoint import TextCompletion, TextEndpoint, TextRequest
from luffy.stages.answers.paid import PaidEndpoint
from luffy.stages.answers.store import AnswerStore
from luffy.types import FinishReason, Message

PARAMS = SamplingParams(0.7, max_response_tokens=8, stop_token_ids=(), top_p=0.9, stop=("</answer>",))
KEY = "sk-hunter2"


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def opened():
    """Closes at the end what it is given."""
    with ExitStack() as stack:
        yield lambda client: stack.enter_context(closing(client))


@pytest.fixture
def connect(tmp_path, opened):
    def open_one(*served, paths=("/chat/completions",), request=None, **config):
        servers = ServerConfig(urls=tuple(each.url for each in served), **config)
        endpoint = opened(TextEndpoint.connect(EndpointModel(name="gpt-x", request=request or {}), servers, paths))
        return PaidEndpoint(endpoint, AnswerStore(tmp_path / "paid_answers.jsonl"))

    return open_one


def chats(count):
    return [TextRequest((Message("system", "Think."), Message("user", f"{i} + 1?")), 2**40 + i) for i in range(count)]


def test_a_chat_is_asked_with_all_that_the_protocol_says(serve, connect):
    served = serve(key=KEY)
    connect(served, request={"reasoning_effort": "low"}).generate(chats(1), PARAMS)
    expected = {
        "messages": [{"role": "system", "content": "Think."}, {"role": "user", "content": "0 + 1?"}],
        "model": "gpt-x", "max_tokens": 8, "temperature": 0.7, "top_p": 0.9, "seed": 2**40 % 2**31,
        "stop": ["</answer>"], "reasoning_effort": "low",
    }  # fmt: skip
    assert served.asked == [(CHAT, expected)]


def test_a_text_is_continued(serve, connect):
    served = serve(lambda path, body: text_completion(f"{path} {body['prompt']}", "length"))
    endpoint = connect(served, paths=("/completions",), request={"seed": None})
    assert endpoint.generate([TextRequest("1 + 1 =", 3)], PARAMS) == [
        TextCompletion(f"{TEXT} 1 + 1 =", 7, FinishReason.LENGTH, prompt_tokens=len("1 + 1 =") + 32)  # a bound
    ]
    assert "seed" not in served.asked[0][1]


def test_completions_come_in_the_order_of_the_requests_from_all_servers(serve, connect):
    def in_a_pair():
        both_are_here, numbers = threading.Barrier(2, timeout=PATIENCE_S), itertools.count()

        def answer(path, body):
            if next(numbers) < 2:  # later requests may come alone
                both_are_here.wait()
            return completion(body["messages"][1]["content"])

        return answer

    servers = serve(in_a_pair()), serve(in_a_pair())
    found = connect(*servers, concurrency=2).generate(chats(12), PARAMS)
    assert [each.text for each in found] == [f"{i} + 1?" for i in range(12)]
    assert sum(len(each.asked) for each in servers) == 12 and all(len(each.asked) >= 2 for each in servers)
    assert {each.most_at_once for each in servers} == {2}


def test_reasoning_stands_before_the_answer_as_models_write_it(serve, connect):
    cases = (
        ({"content": "2", "reasoning_content": "1 + 1"}, "stop", "<think>\n1 + 1\n</think>\n\n2"),
        ({"content": "2", "reasoning": "1 + 1"}, "eos", "<think>\n1 + 1\n</think>\n\n2"),
        ({"content": None, "reasoning_content": "\\boxed{2}"}, "length", "<think>\n\\boxed{2}"),
        ({"content": "1"}, "model_length", "1"),
        ({"content": "", "reasoning": "hm"}, "stop", "<think>\nhm\n</think>\n\n"),
        ({"content": "<think>1</think>2", "reasoning_content": None}, "stop", "<think>1</think>2"),
        ({"content": None}, "content_filter", ""),
        ({"content": "a \ud800"}, "eos_token", "a ?"),
    )

    def answer(path, body):
        message, finish_reason, _ = cases[int(body["messages"][1]["content"][0])]
        return completion("", finish_reason, **message)

    found = connect(serve(answer)).generate(chats(len(cases)), PARAMS)
    assert [each.text for each in found] == [text for *_, text in cases]
    ended = [each.finish_reason is FinishReason.LENGTH for each in found]
    assert ended == ["length" in finish_reason for _, finish_reason, _ in cases]


def test_a_stop_text_that_the_server_cut_off_belongs_to_the_response(serve, connect):
    cases = (
        ("<answer>2", {"stop_reason": "</answer>"}, "<answer>2</answer>"),
        ("<answer>2</answer>", {"matched_stop": "</answer>"}, "<answer>2</answer>"),
        ("<answer>2", {}, "<answer>2</answer>"),
        ("2", {}, "2"),
        ("<answer>2", {"finish_reason": "length"}, "<answer>2"),
        # A tag that the model left open is not closed for it; a text that is null is empty.
        ("<answer>2", {"stop_reason": None}, "<answer>2"),
        ("<answer>2", {"matched_stop": 151645}, "<answer>2"),
        ("<answer>2", {"finish_reason": "content_filter"}, "<answer>2"),
        (None, {}, ""),
    )

    def answer(path, body):
        said, choice, _ = cases[int(body["prompt"])]
        return text_completion(said, **choice)

    requests = [TextRequest(str(place), 3) for place in range(len(cases))]
    found = connect(serve(answer), paths=("/completions",), concurrency=1).generate(requests, PARAMS)
    assert [each.text for each in found] == [text for *_, text in cases]


def test_a_server_that_says_when_is_not_asked_before(serve, connect):
    replies = [refusal(429, "slow down", Retry_After=email.utils.formatdate(time.time() + 2, usegmt=True))]
    served = serve(lambda path, body: replies.pop() if replies else by_seed(path, body))
    began = time.monotonic()
    connect(served).generate(chats(1), PARAMS)
    assert time.monotonic() - began > 0.9
    assert len(served.asked) == 2


def test_a_complaint_is_shown_without_the_prompt_that_it_quotes(serve, connect):
    secret = "Which of these isotopes decays first, and into what?"
    served = serve(lambda path, body: refusal(400, f"input {body['messages']} is too long" + "x" * 900))
    with pytest.raises(ConfigError, match="is too long") as caught:
        connect(served).generate([TextRequest((Message("user", secret),), 1)], PARAMS)
    assert "isotopes" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_a_model_that_wants_the_limit_under_its_other_name_gets_it(serve, connect):
    def reasoning_model(path, body):
        if "max_tokens" in body:
            return refusal(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.")
        return by_seed(path, body)

    served = serve(reasoning_model)
    endpoint = connect(served, concurrency=1)
    endpoint.generate(chats(4), PARAMS)
    limits = [(body.get("max_tokens"), body.get("max_completion_tokens")) for _, body in served.asked]
    assert limits == [(8, None), *[(None, 8)] * 4]


def test_an_endpoint_without_a_path_or_at_another_place_is_refused_before_anything_is_asked(serve, connect):
    served = serve(paths=(CHAT,), key=KEY)
    with refused("/v1/completions: status 404: Not Found", "evaluation.template: own", error=ConfigError):
        connect(served, paths=("/chat/completions", "/completions"))
    served._reply = lambda *_: MOVED
    with refused("https://new/v1", "execution.server.urls", error=ConfigError):
        connect(served)
    assert served.asked == []


def test_what_is_under_way_when_another_fails_is_kept_and_nothing_more_is_asked(serve, connect, tmp_path, monkeypatch):
    has_read_the_refusal, read = threading.Event(), TextEndpoint._refusal

    def read_refusal(*arguments):
        has_read_the_refusal.set()
        return read(*arguments)

    def one_bad(path, body):
        if body["messages"][1]["content"] == "1 + 1?":
            return refusal(400, "no")
        assert has_read_the_refusal.wait(PATIENCE_S)
        return by_seed(path, body)

    monkeypatch.setattr(TextEndpoint, "_refusal", read_refusal)
    served = serve(one_bad)
    with pytest.raises(ConfigError, match="status 400: no"):
        connect(served, concurrency=3).generate(chats(9), PARAMS)
    assert len(served.asked) == 3
    assert (tmp_path / "paid_answers.jsonl").read_bytes().count(b"\n\n") == 2


def test_answers_belong_to_a_request_and_its_draw(serve, connect):
    served = serve(lambda path, body: completion("the same"))
    endpoint = connect(served, request={"seed": None})
    turns = (Message("user", "1"),)
    for seed, params in ((1, PARAMS), (2, PARAMS), (1, SamplingParams(1.0, 8, ())), (1, PARAMS)):
        endpoint.generate([TextRequest(turns, seed)], params)
    assert len(served.asked) == 3
    served.answer = lambda path, body: completion("", "abort")  # which is asked again, and paid for by none
    with pytest.raises(LostError, match="unexpected finish_reason 'abort'"):
        endpoint.generate([TextRequest(turns, 3)], PARAMS)
    assert len(served.asked) == 3 + 3


def test_urls_are_those_of_different_servers_with_or_without_what_openai_puts_below_them_or_refused():
    given = ("http://a:1/", "https://a/x/v1/", "http://[::1]:8000/v1", "http://b", "https://c/openai")
    config = ServerConfig(urls=given)
    assert config.roots == ("http://a:1", "https://a/x", "http://[::1]:8000", "http://b", "https://c/openai")
    assert config.api_roots == (*(f"{root}/v1" for root in config.roots[:4]), "https://c/openai")
    for url in ("localhost:8000", "http://", "http://a:b", "http://a:1/?x", "ftp://a", "http://k@a"):
        with refused("execution.server.urls", "http://host:8000", error=ConfigError):
            load_experiment(SMOKE, ["evaluation.engine=openai", f"execution.server.urls=['{url}']"])


# Two clients of servers that fail, each with the section of the configuration that errors name and the path it asks.

TEACHER = "execution.rl_teachers.big"
CLIENTS = {
    "texts": SimpleNamespace(
        setting="execution.server", path=CHAT, paths=(CHAT,), good=by_seed,
        connect=lambda config: TextEndpoint.connect(EndpointModel(name="gpt-x"), config, ["/chat/completions"]),
        ask=lambda endpoint: endpoint.run(endpoint.complete(TextRequest((), 1), PARAMS)),
    ),
    "scores": SimpleNamespace(
        setting=TEACHER, path=TEXT, paths=SCORING_PATHS, good=scoring,
        connect=lambda config: ServedScorer.connect(config, "big", longest=8, known={}, setting=TEACHER),
        ask=lambda scorer: scorer.score([ScoreRequest((5, 9), 1)]),
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)


@pytest.fixture
def pair(client, serve, opened):
    """A server that answers well, and a function that connects the client to it."""
    served = serve(client.good, client.paths, KEY)
    return served, lambda **config: opened(client.connect(ServerConfig(urls=(served.url,), **config)))


def says(served, *replies):
    """Have the server answer with these, the last one for good; a function is called, and asked if it takes that."""
    left = list(replies)
    served.asked.clear()

    def answer(path, body):
        said = left.pop(0) if len(left) > 1 else left[0]
        return said(path, body) if callable(said) else said

    served.answer = answer


NO_TEXT = ((LostError, "has no text"), (ClusterError, "has no log-probability for every token"))
MOVED = Reply(308, b"<html>", {"Location": "https://new/v1"})


@EACH
@pytest.mark.parametrize(
    ("reply", "attempts", "of_texts", "of_scores"),
    [
        # What may pass later is tried again, and is worth another run of the stage.
        (refusal(500, "engine\n dead"), 3, *[(LostError, "status 500: engine dead")] * 2),
        (None, 3, *[(LostError, "no answer (")] * 2),
        (refusal(200, "upstream failed"), 3, *[(LostError, "upstream failed")] * 2),
        (refusal(429, "daily limit", Retry_After="86400"), 1,
         *[(LostError, "429: daily limit (Retry-After: 86400)")] * 2),
        # What cannot pass is not.
        (refusal(400, f"too\n long {KEY}"), 1,
         (ConfigError, "the model 'gpt-x' refuses the request: status 400: too long ***"),
         (ClusterError, "status 400: too long ***")),
        (refusal(402, "no credit"), 1, (ConfigError, "refuses the request: status 402: no credit"),
         (ClusterError, "status 402: no credit")),
        (refusal(401, f"wrong key {KEY}"), 1,
         (ConfigError, "wrong key ***: the API key is read from the environment variable OPENAI_API_KEY"),
         (ClusterError, "wrong key ***")),
        (MOVED, 1, (ConfigError, "the server redirects to https://new/v1; correct execution.server.urls"),
         (ClusterError, "the server redirects to https://new/v1")),
        (Reply(404, b"?"), 1, (ConfigError, "status 404: ?: no model 'gpt-x' there"), (ClusterError, "status 404")),
        (completion("", "abort"), 1, (LostError, "unexpected finish_reason 'abort'"), NO_TEXT[1]),
        (completion("", ["stop"]), 1, *NO_TEXT),
        *((Reply(body=body), 1, *NO_TEXT) for body in (
            b"<html>", {"choices": []}, b"[" * 200_000, b'{"choices":' * 200_000,
            {"choices": [{"text": "a", "finish_reason": "stop"}]},
        )),
    ],
)  # fmt: skip
def test_a_failure_is_one_line_that_names_the_server_and_its_words(client, pair, reply, attempts, of_texts, of_scores):
    (served, connect), (kind, words) = pair, of_texts if client.setting == "execution.server" else of_scores
    connected = connect(max_retries=2)
    says(served, reply)
    with pytest.raises(kind) as caught:
        client.ask(connected)
    assert isinstance(caught.value, LostError) == (kind is LostError)
    line = str(caught.value)
    assert words in line and line.startswith(served.url) and "\n" not in line and KEY not in line
    assert [path for path, _ in served.asked] == [client.path] * attempts


@EACH
def test_what_passes_is_tried_again(client, pair):
    served, connect = pair
    connected = connect(max_retries=5)
    before = client.ask(connected)
    slow_down, busy = refusal(429, "slow down", Retry_After="0"), (refusal(503, "overloaded"), refusal(408, "too slow"))
    says(served, slow_down, *busy, None, refusal(200, "upstream failed"), client.good)
    assert client.ask(connected) == before
    assert [path for path, _ in served.asked] == [client.path] * 6


@EACH
def test_silence_is_asked_again_and_a_server_that_cannot_be_used_refused_before_anything_is(client, pair, monkeypatch):
    (served, connect), forever = pair, threading.Event()

    def silent(path, body):
        return Reply(body={"waited": forever.wait(PATIENCE_S)})

    connected = connect(request_timeout_s=4.0)
    says(served, silent, client.good)
    assert client.ask(connected) and len(served.asked) == 2
    variable = f"{client.setting}.api_key_variable"
    with refused("UNSET_KEY", variable, "not set", error=ConfigError):
        connect(api_key_variable="UNSET_KEY")
    wrong = dict.fromkeys(("sk hunter2", "sk-hunter2\r", "sk-hünter2"), "holds no API key")
    for key, words in {"sk-wrong": "which holds a", **wrong}.items():
        monkeypatch.setenv("OTHER_KEY", key)
        with pytest.raises(ConfigError, match=rf"OTHER_KEY \({variable}\).* {words}") as caught:
            connect(api_key_variable="OTHER_KEY")
        assert "nter2" not in str(caught.value) and "sk-wrong" not in str(caught.value)
    served._reply = lambda path, body, key: silent(path, body)
    with refused(f"{client.setting}.urls: {served.url}", "within 0.2 s", error=ConfigError):
        connect(request_timeout_s=0.2)
    forever.set()
    served.close()
    with refused(f"{client.setting}.urls: {served.url}", "no answer (", error=ConfigError):
        connect()
