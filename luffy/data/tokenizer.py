"""The experiment's tokenizer: built from the data for an embedded base policy, or adapted from a model's own."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from luffy.config.foreign_folders import model_files
from luffy.config.model import GGUF, locate
from luffy.config.shipped import template_file
from luffy.data.templates import PLAIN_TEMPLATE, prompt_texts, stop_token_ids
from luffy.errors import DataError
from luffy.files import refuse_special
from luffy.types import Message, Prompt

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
"""Single tokens wherever they occur, so that a policy opens or closes its reasoning and its box with one token."""
MAX_VOCABULARY = 512
"""Vocabulary limit of an embedded policy: 256 bytes, the tokens above, and frequent pieces of the data."""
POLICY_SETTING = "model.path"
_QUESTION = Message("user", "LUFFYASKED")


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Yield every text of the prompts that will be tokenised: messages, traces, reference answers."""
    for prompt in prompts:
        yield from (message.content for message in prompt.messages)
        yield from (trace.text for trace in prompt.traces)
        yield prompt.ground_truth


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerBase:
    """Return a Qwen2 tokenizer (byte-level byte-pair encoding) trained on `texts`, of at most `MAX_VOCABULARY` tokens.

    It is Qwen2's own class and pre-tokenizer because the embedded policy is a Qwen2: transformers 5 loads the
    tokenizer of such a folder by the model's type and rebuilds it, so any other kind would come back as another
    tokenizer, in silence. Digits are tokens of their own, every text decodes to itself, and the same texts always give
    the same ids.
    """
    trainee = Tokenizer(models.BPE())
    qwen = Qwen2Tokenizer().backend_tokenizer
    trainee.normalizer, trainee.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, BOS, EOS, *WHOLE_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trainee.train_from_iterator(_without_whole_tokens(texts), trainer)
    learned = json.loads(trainee.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(pair) for pair in learned["merges"]],  # type: ignore[misc]  # annotated as text, but read as pairs
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=None,  # type: ignore[arg-type]  # allowed, though not annotated: no byte is unknown
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=PLAIN_TEMPLATE,
    )
    # Text that happens to be one token each, not control tokens: they stay in what is decoded.
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in WHOLE_TOKENS])
    return tokenizer


def _without_whole_tokens(texts: Iterable[str]) -> Iterator[str]:
    """The texts without `WHOLE_TOKENS`, so that no merge is learned from their letters."""
    cut = re.compile("|".join(map(re.escape, WHOLE_TOKENS)))
    for text in texts:
        yield from cut.split(text)


def adapt_tokenizer(
    model_path: str, chat_template: str | None, setting: str = POLICY_SETTING
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a `ModelConfig.source`, with the chat template `chat_template` (name or file) if given.

    DataError where the model has no tokenizer, or no chat template that writes a question. A missing pad token becomes
    the stop token: padding is always masked. Messages name `setting`, where the model is configured.
    """
    from transformers import AutoTokenizer  # loads torch, which a tokenizer built from the data can do without

    here = locate(model_path)
    if (folder := Path(here).expanduser()).is_dir():
        model_files(folder, setting)  # what is read here, saving the tokenizer copies
    try:
        if here.endswith(GGUF):
            tokenizer = AutoTokenizer.from_pretrained(
                Path(here).parent, gguf_file=Path(here).name, trust_remote_code=False
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(here, trust_remote_code=False)
    except ImportError as error:
        raise DataError(f"{setting}: a {GGUF} file needs `pip install 'luffy-rl[gguf]'` ({error})") from None
    except Exception as error:  # noqa: BLE001 - a file that is no tokenizer raises anything in transformers and tokenizers
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DataError(f"{setting}: no tokenizer at {model_path!r}: {reason}") from None
    if chat_template is not None:
        tokenizer.chat_template = _read_template(template_file(chat_template))
    remedy = "choose another model"
    if setting == POLICY_SETTING:
        remedy = "give model.chat_template (`none` where evaluation.template formats the prompt)"
    if tokenizer.chat_template is None:
        raise DataError(f"{setting}: the tokenizer of {model_path!r} has no chat template; {remedy}")
    stop_token_ids(tokenizer)
    if _QUESTION.content not in prompt_texts(tokenizer, [[_QUESTION]])[0]:
        raise DataError(
            f"{setting}: the chat template of {model_path!r} leaves out the user's message (does it want a list of "
            f"parts in place of a text?); {remedy}"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's folder, chat template included."""
    tokenizer.save_pretrained(str(folder))


def _read_template(path: Path) -> str:
    try:
        refuse_special(path)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"model.chat_template: {path}: no such file (working directory {Path.cwd()})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"model.chat_template: {path}: cannot be read ({error})") from None
