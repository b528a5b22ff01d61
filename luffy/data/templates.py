"""Conversion between text and token ids; the only module that handles chat templates, the stop token and `<think>`.

    tokenizer = load_tokenizer(folder)
    (prompt_ids,) = render_prompts(tokenizer, [prompt.messages])
    (response_ids,) = encode_traces(tokenizer, [trace.text])     # ends with the stop token
    text = decode(tokenizer, response_ids)

Many rows at once are several times faster than one by one.
"""

import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from luffy.config.model import TODAY
from luffy.errors import DataError, first_line
from luffy.types import Message

PLAIN_TEMPLATE = (
    "{{ bos_token }}{{ messages | map(attribute='content') | join('\\n') }}"
    "{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)
"""The embedded base policy's chat template: the turns, one per line, without role markers."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_THINK_OPENERS = ("<think>\n", "<think>")
_TEXTS_AT_ONCE = 8192
_PROBE = (Message("user", "LUFFYASKED"),)
_REPLY = Message("assistant", "LUFFYREPLY")
_TODAY_WRITTEN = re.compile(TODAY + r"""\(\s*(["'])((?:(?!\1).)*)\1\s*\)""")
_TODAY_KNOWN = re.compile(TODAY + r"\s+is\s+defined")
_STOP_TOKENS = "stop_token_ids"
"""Key of `tokenizer_config.json`, which every model folder has; absent where only the end-of-sequence token ends
responses."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a prepared folder; DataError where there is none. Nothing is fetched."""
    if not (folder / "tokenizer_config.json").is_file():
        raise DataError(f"{folder}: holds no tokenizer (tokenizer_config.json); prepare the data again")
    from transformers import AutoTokenizer  # loads torch, which those who only count tokens can do without

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)


def render_prompts(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
    """Return the ids of each conversation under the chat template, up to where the assistant begins to write."""
    return _encode(tokenizer, prompt_texts(tokenizer, conversations))


def encode_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids of prompts made without a chat template, with the tokenizer's own opening tokens in front."""
    # A post-processor may also append tokens (T5's end of sequence), which a prompt must not have.
    opening = [token for token in tokenizer("")["input_ids"] if token != tokenizer.eos_token_id]
    # A template may write them itself.
    return [ids if ids[: len(opening)] == opening else [*opening, *ids] for ids in _encode(tokenizer, texts)]


def encode_traces(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the ids that each trace has after a prompt, followed by the stop token that rollouts end with.

    Where the chat template's prompt already ends with `<think>`, that of the trace is dropped.
    """
    stop = stop_token_ids(tokenizer)[0]
    return [[*ids, stop] for ids in _after_prompt(tokenizer, texts)]


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a piece of text, without any token around it."""
    return _encode(tokenizer, [text])[0]


def prompt_lengths(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[int]:
    return [len(encoding) for encoding in _encodings(tokenizer, prompt_texts(tokenizer, conversations))]


def trace_lengths(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each trace, its stop token included."""
    return [len(ids) + 1 for ids in _after_prompt(tokenizer, texts)]


def with_date(template: str, day: str | None, remedy: str) -> str:
    """Return a chat template that writes `day` (ISO) where it asked for today's date (`strftime_now`, as Llama 3's and
    Granite's do): a resumed run would otherwise have other prompts.

    DataError that ends with `remedy` where there is no day, or no text in the call that says how to write it.
    """
    if TODAY not in template:
        return template
    if day is None:
        raise DataError(f"the chat template writes today's date ({TODAY}), which changes under a run; {remedy}")
    try:
        date = datetime.date.fromisoformat(day)
    except ValueError as error:
        raise DataError(f"{day} is no day ({error}); {remedy}") from None
    fixed = _TODAY_WRITTEN.sub(lambda call: json.dumps(date.strftime(call[2]), ensure_ascii=False), template)
    fixed = _TODAY_KNOWN.sub("true", fixed)
    if TODAY in fixed:
        raise DataError(f"the chat template calls {TODAY} with a computed format; write the date into the template")
    return fixed


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that end a response; the first one is appended to traces."""
    if tokenizer.eos_token_id is None:
        raise DataError(f"{tokenizer.name_or_path}: the tokenizer has no eos_token, so responses could not end")
    return tuple(tokenizer.init_kwargs.get(_STOP_TOKENS) or (int(tokenizer.eos_token_id),))


def add_stop_tokens(tokenizer: PreTrainedTokenizerBase, named: Iterable[int]) -> None:
    """Let the tokens that a model's own settings name end responses, too (`stop_token_ids`).

    Traces end with the one of them that ends a turn of the chat template: the end-of-sequence token of Llama 3 or Phi 3
    may be another. What is no token of the vocabulary is left out, since it is never sampled.
    """
    vocabulary = set(tokenizer.get_vocab().values())
    ends = {*stop_token_ids(tokenizer), *vocabulary.intersection(named)}
    last = turn_end(tokenizer)
    first = last if last in ends else int(tokenizer.eos_token_id)
    if len(ends) > 1:
        tokenizer.init_kwargs[_STOP_TOKENS] = [first, *sorted(ends - {first})]


def stop_texts(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in stop_token_ids(tokenizer))


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that the chat template writes right after an assistant's message; None: none is."""
    try:
        (text,) = prompt_texts(tokenizer, [[*_PROBE, _REPLY, *_PROBE]])
    except DataError:  # a template for a single question
        return None
    after = text.partition(_REPLY.content)[2]
    special = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special.get(max((token for token in special if after.startswith(token)), key=len, default=""))


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Return the text of a response without the final stop token."""
    ended = bool(ids) and ids[-1] in stop_token_ids(tokenizer)
    shown = list(ids[:-1] if ended else ids)
    return cast(str, tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def prompt_opener(tokenizer: PreTrainedTokenizerBase) -> str:
    r"""Return the `<think>` or `<think>\n` with which the template's generation prompt ends, or ""."""
    return opener_of(_generation_prompt(tokenizer))


def with_opened_thinking(text: str) -> str:
    """Return the trace with an opening `<think>` where it has only the closing tag: some datasets leave the opening one
    to the chat template."""
    before, closed, _ = text.partition(_THINK_CLOSE)
    return f"{_THINK_OPENERS[0]}{text.lstrip()}" if closed and _THINK_OPEN not in before else text


def is_complete(text: str, opener: str) -> bool:
    """Whether a trace closes its reasoning if it, or the prompt that ends with `opener`, has opened one."""
    opened = bool(opener) or _THINK_OPEN in text
    return not opened or text.rfind(_THINK_CLOSE) > text.rfind(_THINK_OPEN)


def opener_of(prompt_text: str) -> str:
    r"""Return the `<think>` or `<think>\n` with which a prompt ends, or ""."""
    return next((opener for opener in _THINK_OPENERS if prompt_text.endswith(opener)), "")


def _after_opener(opener: str, text: str) -> str:
    """The trace as the policy has to generate it: without the `<think>` that the prompt already contains."""
    if not opener or not text.lstrip().startswith(_THINK_OPEN):
        return text
    rest = text.lstrip().removeprefix(_THINK_OPEN)
    return rest.removeprefix("\n") if opener.endswith("\n") else rest


def prompt_texts(tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]]) -> list[str]:
    """Return each conversation as the chat template writes it, up to where the assistant begins to write."""
    if tokenizer.chat_template == PLAIN_TEMPLATE:
        # The same text without Jinja, which takes most of the time of preparing a large corpus.
        start = str(tokenizer.bos_token)
        return [
            "\n".join([start + messages[0].content, *[turn.content for turn in messages[1:]], ""])
            for messages in conversations
        ]
    if tokenizer.chat_template is None:
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; give model.chat_template (`none` "
            "where evaluation.template formats the prompts)"
        )
    turns = [[{"role": turn.role, "content": turn.content} for turn in messages] for messages in conversations]
    try:
        # transformers runs it in Jinja's immutable sandbox.
        return cast(list[str], tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # noqa: BLE001 - a template is a program of the model's authors, which may raise anything
        raise DataError(
            f"{tokenizer.name_or_path}: the chat template cannot write a conversation ({first_line(error)}); give "
            "another one as model.chat_template"
        ) from None


def _generation_prompt(tokenizer: PreTrainedTokenizerBase) -> str:
    """What the chat template writes between a question and where the assistant begins."""
    (text,) = prompt_texts(tokenizer, [_PROBE])
    return text.rpartition(_PROBE[0].content)[2]


def _after_prompt(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[list[int]]:
    """The ids of texts that follow a prompt. On their own they may have others: Llama 2's tokenizer begins every text
    with a space. Where the prompt's last token would merge with the text, the prompt stays as rollouts have it."""
    opened = _generation_prompt(tokenizer)
    before = _PROBE[0].content[-1] + opened
    (start,) = _encode(tokenizer, [before])
    written = [_after_opener(opener_of(opened), text) for text in texts]
    for text, encoding in zip(written, _encodings(tokenizer, [before + text for text in written]), strict=True):
        ids = list(encoding.ids)
        yield ids[len(start) :] if ids[: len(start)] == start else _encode(tokenizer, [text])[0]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return [list(encoding.ids) for encoding in _encodings(tokenizer, texts)]


def _encodings(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Iterator[Encoding]:
    """The backend's batch call: it takes a third of the time of the tokenizer's `__call__` and builds ids lazily."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        # The template has already added its special tokens.
        yield from backend.encode_batch_fast(list(texts[start : start + _TEXTS_AT_ONCE]), add_special_tokens=False)
