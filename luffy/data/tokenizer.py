"""The experiment's tokenizer: built from the data for an embedded base policy, or adapted from a model's own."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from luffy.data.templates import PLAIN_TEMPLATE, stop_token_ids
from luffy.errors import DataError
from luffy.types import Prompt

PAD, BOS, EOS, UNKNOWN = "<|pad|>", "<|bos|>", "<|eos|>", "<|unk|>"
WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
"""Single tokens wherever they occur: a policy opens and closes its reasoning and its box by one choice each."""
MAX_VOCABULARY = 512
_WORD = r" ?[A-Za-z]+:?|[+-]\d|\d| ?[^\sA-Za-z\d]|\s"
"""Where merges may happen: a word with its leading space, a signed digit, a digit, a mark, a white space."""


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Yield every text of the prompts that will be tokenised: messages, traces, reference answers."""
    for prompt in prompts:
        yield from (message.content for message in prompt.messages)
        yield from (trace.text for trace in prompt.traces)
        yield prompt.ground_truth


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a byte-pair tokenizer trained on `texts`, of at most `MAX_VOCABULARY` tokens.

    Its alphabet is the characters of the texts, its merges stay inside words, and the digits of a number are tokens of
    their own: a policy that computes must see them. Any text of these characters decodes to itself, spaces and line
    ends included; other characters become `<|unk|>`. The same texts always give the same ids.
    """
    texts = list(texts)
    specials = [AddedToken(token, normalized=False) for token in (PAD, BOS, EOS, UNKNOWN, *WHOLE_TOKENS)]
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        special_tokens=specials,
        initial_alphabet=sorted(set().union("\n", *texts)),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_whole_tokens(texts), trainer)
    # Only these are control tokens; the others are text that happens to be one token each.
    tokenizer.add_special_tokens(specials[:4])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in WHOLE_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        chat_template=PLAIN_TEMPLATE,
    )


def _without_whole_tokens(texts: Iterable[str]) -> Iterator[str]:
    """Cut out what is always one token, so that no merge learns its letters."""
    cut = re.compile("|".join(map(re.escape, WHOLE_TOKENS)))
    for text in texts:
        yield from cut.split(text)


def adapt_tokenizer(model_path: str, chat_template: str | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model folder or hub id, with the chat template of the file `chat_template` if given.

    DataError where the model has no tokenizer, or no chat template and none is given. A missing pad token becomes the
    stop token: padding is always masked.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(f"model.path: no tokenizer at {model_path!r}: {reason}") from None
    if chat_template is not None:
        tokenizer.chat_template = _read_template(Path(chat_template))
    if tokenizer.chat_template is None:
        raise DataError(f"model.path: the tokenizer of {model_path!r} has no chat template; give model.chat_template")
    stop_token_ids(tokenizer)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's folder, chat template included."""
    tokenizer.save_pretrained(str(folder))


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"model.chat_template: {path}: no such file (working directory {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"model.chat_template: {path}: cannot be read ({error})") from None
