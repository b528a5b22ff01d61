"""A tiny tokenizer, problems in its alphabet, and an engine that says what it is told to."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from luffy.data.templates import decode
from luffy.data.tokenizer import build_tokenizer
from luffy.rollout.engine import Completion, RolloutRequest, SamplingParams
from luffy.types import FinishReason, Message, Prompt


def tiny_tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(["0123456789 +-=\\boxed{}<think></think>\nrev"])


def problems(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", "sums", (Message("user", f"{i} +1"),), ground_truth=str(i + 1)) for i in range(count)]


class ScriptedEngine:
    """Answers each prompt with `script(prompt text, seed)`; an answer past the limit is cut there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, script: Callable[[str, int], str]) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self.requests: list[RolloutRequest] = []
        self.closed = False

    def generate(self, requests: Sequence[RolloutRequest], params: SamplingParams) -> list[Completion]:
        self.requests += requests
        return [self._complete(request, params) for request in requests]

    def close(self) -> None:
        self.closed = True

    def _complete(self, request: RolloutRequest, params: SamplingParams) -> Completion:
        text = self._script(decode(self._tokenizer, request.prompt_ids), request.seed)
        ids = (*self._tokenizer(text, add_special_tokens=False)["input_ids"], params.stop_token_ids[0])
        reason = FinishReason.STOP if len(ids) <= params.max_response_tokens else FinishReason.LENGTH
        ids = ids[: params.max_response_tokens]
        return Completion(ids, (0.0,) * len(ids), reason, 0)
