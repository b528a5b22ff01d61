"""Servers over `synthetic.endpoint` that answer by a script, and what a vLLM server answers that scores tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from synthetic.endpoint import TEXT, Endpoint, Reply, refusal

KEY = "secret"
GOOD = Reply()
"""In a script of replies: what a good server answers."""
Said = Reply | None | Callable[[], Reply]


@dataclass
class FakeServer:
    """It records what it is asked, and answers by `replies` before it answers as a good server does."""

    good: Callable[[str, dict], Reply]
    replies: dict[str, list[Said]] = field(default_factory=dict)
    """Of a path, in order; the last one stays. None: hang up."""
    asked: list[tuple[str, dict]] = field(default_factory=list)
    url: str = ""

    def on(self, endpoint: Endpoint) -> "FakeServer":
        """The server behind this endpoint."""
        endpoint._reply, self.url = self._reply, endpoint.url  # type: ignore[method-assign]
        return self

    def _reply(self, path: str, body: dict | None, key: str | None) -> Reply | None:
        path, body = urlsplit(path).path, body or {}
        self.asked.append((path, body))
        if path.startswith("/v1") and key != f"Bearer {KEY}":
            return refusal(401, f"Incorrect API key provided: {key}")
        left = self.replies.get(path, [GOOD])
        said = left.pop(0) if len(left) > 1 else left[0]
        if said is GOOD:
            return self.good(path, body)
        return said() if callable(said) else said

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


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
