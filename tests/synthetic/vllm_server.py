"""What vLLM servers answer over `synthetic.endpoint`: one with luffy's worker, and one that scores tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from synthetic.endpoint import TEXT, Endpoint, Reply, refusal

KEY = "secret"
CONTEXT = 64
GENERATE = "/inference/v1/generate"
SETTINGS = {
    "dtype": "float32", "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "device": "cpu",
    "chunked_prefill": False,
}  # fmt: skip


GOOD = Reply()
"""In a script of replies: what a good server answers."""
Said = Reply | None | Callable[[], Reply]


@dataclass
class FakeServer:
    """It records what it is asked, and answers by `replies` before it answers as a good server does."""

    context: int = CONTEXT
    settings: Mapping[str, object] = field(default_factory=lambda: dict(SETTINGS))
    loaded: list[str] = field(default_factory=list)
    """Parameters that the next load will not find."""
    replies: dict[str, list[Said]] = field(default_factory=dict)
    """Of a path, in order; the last one stays. None: hang up."""
    good: Callable[[str, dict], Reply] | None = None
    """Answers in place of vLLM with luffy's worker."""
    asked: list[tuple[str, dict]] = field(default_factory=list)
    version: str = "default"
    url: str = ""

    def on(self, endpoint: Endpoint) -> "FakeServer":
        """The server behind this endpoint."""
        endpoint._reply, self.url = self._reply, endpoint.url  # type: ignore[method-assign]
        return self

    def _reply(self, path: str, body: dict | None, key: str | None) -> Reply | None:
        path, body = urlsplit(path).path, body or {}
        self.asked.append((path, body))
        if path.startswith(("/v1", "/inference")) and key != f"Bearer {KEY}":
            return refusal(401, f"Incorrect API key provided: {key}")
        left = self.replies.get(path, [GOOD])
        said = left.pop(0) if len(left) > 1 else left[0]
        if said is GOOD:
            return (self.good or self._as_vllm)(path, body)
        return said() if callable(said) else said

    def _as_vllm(self, path: str, body: dict) -> Reply:
        match path:
            case "/v1/models":
                return Reply(body={"data": [{"id": "model", "max_model_len": self.context}]})
            case "/collective_rpc":
                results = {"luffy_settings": self.settings, "luffy_difference": None, "luffy_load": self.loaded}
                return Reply(body={"results": [results[body["method"]]]})
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/inference/v1/generate" if not body:
                return Reply(422, {"detail": "field required"})
            case "/inference/v1/generate":
                return sampled(body["sampling_params"]["seed"], self.version)
        return Reply(body={})

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]

    def generated(self) -> list[dict]:
        """Requests for a response, without that which finds out whether the endpoint exists."""
        return [body for path, body in self.asked if path == GENERATE and body]


def sampled(seed: int, *versions: str, **changes: object) -> Reply:
    """One token for each version; the first one is the seed."""
    tokens = [seed, *range(1, len(versions))]
    named = [{"version": name, "start": i, "end": i + 1} for i, name in enumerate(versions)]
    logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]}
    choice = {"token_ids": tokens, "finish_reason": "length", "weight_versions": named, "logprobs": logprobs}
    return Reply(body={"choices": [choice | changes]})


SCORING_PATHS = ("/v1/models", TEXT, "/tokenize")


def scoring(path: str, body: dict) -> Reply:
    """Token n has the log-probability -n / 10, and a text the ids of its letters."""
    if path == "/v1/models":
        return Reply(body={"data": [{"id": "small"}, {"id": "big", "max_model_len": 9}]})
    if path == "/tokenize":
        return Reply(body={"tokens": [ord(letter) for letter in body["prompt"]]})
    _, *others = body["prompt"]
    given = [None, *({str(token): {"logprob": -token / 10}} for token in others)]
    return Reply(body={"choices": [{"prompt_logprobs": given}]})
