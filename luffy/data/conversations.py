"""Token ids of conversations: the tokens between two turns of the policy, and multi-turn traces.

    encoder = ConversationEncoder(tokenizer)
    ids = encoder.between([Message("tool", "42")])     # from the policy's stop token to where its next turn begins
    turns = encoder.trace(trace.turns)                 # ids with the source of each

A conversation is append-only: the ids of a turn are those that were sampled, and nothing is tokenised twice. Chat
templates that rewrite earlier turns (Qwen3's drops their reasoning) are refused, unless the whole conversation may be
rendered again before each turn (`rewritten`).
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from luffy.config.environment import History
from luffy.data.templates import (
    decode,
    encode_traces,
    prompt_opener,
    prompt_texts,
    render_prompts,
    stop_texts,
    stop_token_ids,
)
from luffy.errors import DataError
from luffy.types import Message, Prompt, Source, Trace

_REPLY = Message("assistant", "LUFFYREPLY")
_ASKED = Message("user", "LUFFYASKED")
_THOUGHT = "<think>\nLUFFYTHOUGHT\n</think>\n\nLUFFYANSWER"
_AWKWARD = ' a "quoted"\n<word> '
"""A content that reveals how a template changes contents."""
_MASK = "\ue000"
"""Takes the place of special tokens in contents while the chat template is rendered."""
_MASKED = re.compile(f"{_MASK}(\\d+){_MASK}")


@dataclass(frozen=True, slots=True)
class EncodedTurns:
    """Token ids of a trace of many turns, or of any response."""

    token_ids: tuple[int, ...]
    source: tuple[Source, ...]
    """`OFF_POLICY` for the author's tokens, `ENVIRONMENT` for those between the turns."""
    length: int
    """Number of tokens after the prompt, in the longest context."""
    context_starts: tuple[int, ...] = ()


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], history: History = "exact"
) -> list[list[EncodedTurns]]:
    """Return the ids of each prompt's traces, the stop token at the end of every turn included.

    Raises DataError for traces of many turns under a chat template that rewrites earlier turns, with `history: exact`.
    """
    singles = [trace.text for prompt in prompts for trace in prompt.traces if not trace.turns]
    written = iter(encode_traces(tokenizer, singles))
    has_turns = any(trace.turns for prompt in prompts for trace in prompt.traces)
    encoder = ConversationEncoder(tokenizer, history) if has_turns else None

    def encoded(prompt: Prompt, trace: Trace) -> EncodedTurns:
        if encoder is not None and trace.turns:
            return encoder.trace(trace.turns, prompt.messages)
        ids = tuple(next(written))
        return EncodedTurns(ids, (Source.OFF_POLICY,) * len(ids), len(ids))

    return [[encoded(prompt, trace) for trace in prompt.traces] for prompt in prompts]


_Write = Callable[[str], str]
"""How a template changes a content."""
_Piece = str | int | tuple[int, _Write]
"""Text of the template, one of its special tokens, or the place of a message whose content is written here."""


class ConversationEncoder:
    """Encodes conversations under a tokenizer's chat template.

    Contents are tokenised as plain text, so that a tool's output cannot forge the marks of a role. Raises DataError for
    a template that rewrites earlier turns, with `history: exact`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, history: History = "exact") -> None:
        self.history = history
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token.content: token_id for token_id, token in added if token.special and token.content}
        # Special tokens in the text are encoded as text; those of the template are entered by their ids.
        self._plain = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._plain.no_padding()
        self._plain.no_truncation()
        self._pieces = cache(self._pieces_of)
        self.opener = prompt_opener(tokenizer)
        if history == "exact":
            self._check_append_only()

    def is_stopped(self, token_ids: Sequence[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in stop_token_ids(self._tokenizer)

    def prompt(self, messages: Sequence[Message], added: Sequence[Message] = ()) -> tuple[int, ...]:
        """Ids of a prompt with what an environment `added` to it, up to where the policy begins to write.

        Special tokens in `messages`, which come from the data, stay; those in `added` become plain text.
        """
        if added:
            return self.rewritten(messages, (), added)
        return tuple(render_prompts(self._tokenizer, [messages])[0])

    def rewritten(
        self, prompt: Sequence[Message], turns: Sequence[Message], added: Sequence[Message] = ()
    ) -> tuple[int, ...]:
        """Ids of a whole conversation as the chat template writes it now, up to where the policy begins to write.

        The template may change earlier turns. Special tokens in the contents of `turns`, and of what the environment
        `added` to the prompt, become plain text; those in `prompt`, which comes from the data, stay.
        """
        hidden = [*self._special, _MASK]

        def masked(content: str) -> str:
            return _one_of(hidden).sub(lambda found: f"{_MASK}{hidden.index(found.group())}{_MASK}", content)

        shown = [*prompt, *(Message(turn.role, masked(turn.content)) for turn in (*added, *turns))]
        (text,) = prompt_texts(self._tokenizer, [shown])
        ids: list[int] = []
        for part in _one_of(self._special).split(text) if self._special else [text]:
            if part in self._special:
                ids.append(self._special[part])
            else:
                ids += self._encode(_MASKED.sub(lambda found: hidden[int(found.group(1))], part))
        return tuple(ids)

    def reply(self, token_ids: Sequence[int]) -> Message:
        """A turn of the policy as a message, with the `<think>` that the template opened for it."""
        return Message(_REPLY.role, self.opener + decode(self._tokenizer, token_ids))

    def between(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids that follow the stop token of a turn: `messages`, and what opens the next turn."""
        ids: list[int] = []
        text = ""
        for piece in self._pieces(tuple(message.role for message in messages)):
            if isinstance(piece, int):
                ids += [*self._encode(text), piece]
                text = ""
            elif isinstance(piece, str):
                text += piece
            else:
                place, write = piece
                text += write(messages[place].content)
        return (*ids, *self._encode(text))

    def trace(self, turns: Sequence[Message], prompt: Sequence[Message] = ()) -> EncodedTurns:
        """Ids of a trace: `turns` begins and ends with an assistant's; the others are the environment's.

        `prompt` is the start of every context that is rendered again.
        """
        ids: list[int] = []
        source: list[Source] = []
        starts: list[int] = []
        prompt_ids = self.prompt(prompt) if self.history == "branching" else ()
        seen, longest = [*prompt_ids], 0
        waiting: list[Message] = []
        for place, turn in enumerate(turns):
            if turn.role != _REPLY.role:
                waiting.append(turn)
                continue
            between = self.between(waiting) if waiting and self.history != "branching" else ()
            if waiting and self.history == "branching":
                between, is_new = self.continued(seen, prompt, turns[:place])
                if is_new:
                    starts.append(len(ids))
                    seen = []
            written = encode_traces(self._tokenizer, [turn.content])[0]
            ids += [*between, *written]
            seen += [*between, *written]
            longest = max(longest, len(seen) - len(prompt_ids))
            source += [Source.ENVIRONMENT] * len(between) + [Source.OFF_POLICY] * len(written)
            waiting = []
        return EncodedTurns(tuple(ids), tuple(source), longest, tuple(starts))

    def continued(
        self, seen: Sequence[int], prompt: Sequence[Message], turns: Sequence[Message], added: Sequence[Message] = ()
    ) -> tuple[tuple[int, ...], bool]:
        """The ids before the next turn with `history: branching`, and whether they are a new context.

        Where the template only extends the ids that were `seen`, these are the ids after them; else they are the whole
        conversation (`rewritten`).
        """
        ids = self.rewritten(prompt, turns, added)
        extends = ids[: len(seen)] == tuple(seen)
        return (ids[len(seen) :], False) if extends else (ids, True)

    def _encode(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids) if text else []

    def within(self, message: Message, limit: int) -> Message:
        """The message, cut in the middle where it has more than `limit` tokens."""
        ids = self._encode(message.content)
        if len(ids) <= limit:
            return message
        half = limit // 2
        start, end = (cast(str, self._tokenizer.decode(part)) for part in (ids[:half], ids[len(ids) - half :]))
        return Message(message.role, cut(start, len(ids) - 2 * half, "tokens", end))

    def _pieces_of(self, roles: tuple[str, ...]) -> list[_Piece]:
        """The template's text for messages of these roles, in pieces."""
        slots = [f"LUFFYSLOT{index}END" for index in range(len(roles))]
        text = self._after_reply(roles, slots)
        writes: list[_Write] = []
        for index, slot in enumerate(slots):  # a content stays as it is, or loses outer spaces, or is escaped, or both
            found = self._after_reply(roles, [*slots[:index], _AWKWARD, *slots[index + 1 :]])
            write = next((each for each in _WRITES if text.replace(slot, each(_AWKWARD)) == found), None)
            if write is None:
                raise DataError(
                    f"{self._tokenizer.name_or_path}: the chat template changes the text of {roles[index]} messages, "
                    "so it cannot be extended turn by turn; choose another model.chat_template"
                )
            writes.append(write)
        text = text.removeprefix(stop_texts(self._tokenizer)[0])  # the policy has sampled it, or another one
        parts = filter(None, _one_of([*self._special, *slots]).split(text))
        return [
            (slots.index(part), writes[slots.index(part)]) if part in slots else self._special.get(part, part)
            for part in parts
        ]

    def _after_reply(self, roles: Sequence[str], contents: Sequence[str]) -> str:
        messages = [Message(role, content) for role, content in zip(roles, contents, strict=True)]
        (text,) = prompt_texts(self._tokenizer, [[_ASKED, _REPLY, *messages]])
        _, found, after = text.partition(_REPLY.content)
        if not found or any(content not in after for content in contents if "LUFFY" in content):
            raise DataError(
                f"{self._tokenizer.name_or_path}: the chat template leaves out a message (roles: "
                f"{', '.join(roles)}), so an environment could not answer; choose another model.chat_template"
            )
        return after

    def _check_append_only(self) -> None:
        """Raise DataError where the text of a longer conversation does not start with that of a shorter one."""
        reply = Message(_REPLY.role, _THOUGHT)
        conversation = [_ASKED]
        for _ in range(2):
            (before,) = prompt_texts(self._tokenizer, [conversation])
            conversation = [*conversation, reply, _ASKED]
            (after,) = prompt_texts(self._tokenizer, [conversation])
            if not after.startswith(before.removesuffix(self.opener) + reply.content):
                raise DataError(
                    f"{self._tokenizer.name_or_path}: the chat template rewrites earlier turns (it drops their "
                    "reasoning), so a conversation cannot be extended token by token; choose another "
                    "model.chat_template, or set environment.limits.history: branching to learn each turn under the "
                    "context that the template writes for it, or as_sampled to keep the turns as they were"
                )


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the longest of the texts, as a group: `split` returns them, too."""
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) + ")")


def _escaped(trim: _Write) -> _Write:
    return lambda content: json.dumps(trim(content), ensure_ascii=False)[1:-1]


_TRIMS: tuple[_Write, ...] = (str, str.strip, str.lstrip, str.rstrip)
_WRITES = [write for trim in _TRIMS for write in (trim, _escaped(trim))]
"""What templates do to the contents of messages: they trim them, and escape them as in a JSON string, which is how
Llama 3.1 writes the results of tools."""


_MARK = " ... [{count} {unit} left out] ... "


def cut(start: str, count: int, unit: str, end: str) -> str:
    """`start` and `end` of a message with a mark between them, which says how many tokens or characters are missing.

    A policy sees the cut message, so the conversation, and any trace made from it, holds the cut text.
    """
    return start + _MARK.format(count=count, unit=unit) + end
