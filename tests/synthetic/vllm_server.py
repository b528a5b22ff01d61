"""What a vLLM server answers that scores tokens."""

from synthetic.endpoint import TEXT, Reply

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
