"""The experiment's tokenizer: built from the data for an embedded base policy, or adapted from a model's own."""

import json
import logging
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer

from luffy.confidential import may_show_prompt
from luffy.config.model import GGUF, locate, model_files
from luffy.config.shipped import template_file
from luffy.data.templates import PLAIN_TEMPLATE, add_stop_tokens, prompt_texts, stop_token_ids, with_date
from luffy.errors import DataError, first_line
from luffy.files import refuse_special
from luffy.json_text import parse_json
from luffy.model_shape import num_embeddings
from luffy.types import Message, Prompt

logger = logging.getLogger(__name__)
PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
WHOLE_TOKENS = ("<think>", "</think>", "\\boxed{")
"""Single tokens wherever they occur, so that a policy opens or closes its reasoning and its box with one token."""
MAX_VOCABULARY = 512
"""Vocabulary limit of an embedded policy: 256 bytes, the tokens above, and frequent pieces of the data."""
POLICY_SETTING = "model.path"
_MAX_SHOWN = 60
_QUESTION = Message("user", "LUFFYASKED")


def texts_of(prompts: Iterable[Prompt]) -> Iterable[str]:
    """Yield every text of the prompts that will be tokenised: messages, traces, reference answers.

    None of confidential prompts: pieces of it would be in the tokenizer, which is exported with every policy.
    """
    for prompt in filter(may_show_prompt, prompts):
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
    # Cut, so that no merge is learned from the letters of `WHOLE_TOKENS`.
    whole = re.compile("|".join(map(re.escape, WHOLE_TOKENS)))
    trainee.train_from_iterator((part for text in texts for part in whole.split(text)), trainer)
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


def adapt_tokenizer(
    model_path: str, chat_template: str | None, setting: str = POLICY_SETTING, template_date: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a `ModelConfig.source`, with the chat template `chat_template` (name or file) if given.

    Where the template would write today's date it writes `template_date`.

    The tokens with which the model's own settings end a response are among its `stop_token_ids`. A missing pad token
    becomes the end-of-sequence token: padding is always masked. DataError where the model has no tokenizer, no chat
    template that writes a question, or no embedding for a token. Messages name `setting`, which configures the model.
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
        raise DataError(f"{setting}: no tokenizer at {model_path!r}: {first_line(error)}") from None
    if chat_template is not None:
        file = template_file(chat_template)
        try:
            refuse_special(file)
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise DataError(f"model.chat_template: {file}: no such file (working directory {Path.cwd()})") from None
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"model.chat_template: {file}: cannot be read ({error})") from None
    remedy = "choose another model"
    if setting == POLICY_SETTING:
        remedy = "give model.chat_template (`none` where evaluation.template formats the prompt)"
    if tokenizer.chat_template is None:
        raise DataError(f"{setting}: the tokenizer of {model_path!r} has no chat template; {remedy}")
    dated = f"write a fixed date into the chat template of {model_path}"
    if setting == POLICY_SETTING:
        dated = f"set model.template_date, for example to {datetime.now(UTC).date()}"
    try:
        tokenizer.chat_template = with_date(str(tokenizer.chat_template), template_date, dated)
    except DataError as error:
        raise DataError(f"{setting}: {error}") from None
    stop_token_ids(tokenizer)
    if _QUESTION.content not in prompt_texts(tokenizer, [[_QUESTION]])[0]:
        raise DataError(
            f"{setting}: the chat template of {model_path!r} leaves out the user's message (does it want a list of "
            f"parts in place of a text?); {remedy}"
        )
    if not here.endswith(GGUF):  # whose file holds the vocabulary of its own weights, and one end of a sequence
        config = _settings(here, "config.json")
        if (rows := num_embeddings(config)) is not None:
            _leave_out_beyond(tokenizer, rows, f"{setting}: the model of {model_path!r}")
        # As in transformers, config.json holds where generation_config.json names none.
        ends = _settings(here, "generation_config.json").get("eos_token_id") or config.get("eos_token_id")
        add_stop_tokens(tokenizer, ends if isinstance(ends, list) else [ends] if isinstance(ends, int) else [])
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _leave_out_beyond(tokenizer: PreTrainedTokenizerBase, rows: int, whose: str) -> None:
    """Remove added tokens without an embedding: looking one up would end training, on a GPU in a device assertion.

    Nothing is lost with padding (`[PAD]` added, embeddings not resized), whose embedding never counts, or with a token
    that only its own text in the data would make: the model has never seen it, and reads the text as any other from now
    on. DataError for a token that occurs all the same: one that ends or opens a text, or that the chat template writes;
    and for a vocabulary that is not the model's. New rows are not made up here, since they would not be trained.
    """
    beyond = {token: place for token, place in tokenizer.get_vocab().items() if place >= rows}
    if not beyond:
        return
    if tokenizer.pad_token in beyond:
        tokenizer.pad_token = None
    extra = tokenizer.extra_special_tokens
    tokenizer.extra_special_tokens = [token for token in extra if token not in beyond]
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    template = str(tokenizer.chat_template)
    needed = [
        token for token in beyond if token not in added or token in tokenizer.all_special_tokens or token in template
    ]
    if needed:
        raise DataError(
            f"{whose} has embeddings for {rows} tokens (vocab_size), and its tokenizer writes {needed[0]!r} as "
            f"{beyond[needed[0]]}; take the tokenizer that belongs to it, or give it {max(beyond.values()) + 1} "
            "embeddings (resize_token_embeddings) and train them before"
        )
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < rows]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(state))
    logger.warning(
        "%s has embeddings for %d tokens, and its tokenizer %d more (%s): they are left out, and their text is read as "
        "any other",
        whose, rows, len(beyond), ", ".join(sorted(beyond)[:3]),
    )  # fmt: skip


def _settings(model: str, name: str) -> Mapping[str, Any]:
    """A JSON file of a model folder or of the hub; empty where there is none."""
    from transformers.utils import cached_file

    file = cached_file(
        model, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    try:
        found = parse_json(Path(file).read_bytes()) if file is not None else {}
    except ValueError as error:
        raise DataError(f"{file}: is no JSON file ({error})") from None
    return found if isinstance(found, dict) else {}


def check_scores(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase, whose: str) -> None:
    """Raise DataError, naming `whose` tokenizer `own` is, where that model cannot score the policy's tokens."""
    if (difference := tokenizer_difference(own, policy)) is not None:
        raise DataError(
            f"{whose} is not the policy's, whose tokens it has to score ({difference}); take one trained from the "
            "policy's base or of its family, or let it write traces instead (sample.teachers)"
        )


def tokenizer_difference(own: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> str | None:
    """The first difference by which a text gets other ids, or ends otherwise, than with the policy's tokenizer; None
    where there is none.

    Tokens that only one of them has at the end of its vocabulary, such as padding, are no difference.
    """
    shared = min(len(own), len(policy))

    def rules(tokenizer: PreTrainedTokenizerBase) -> dict[str, object]:
        found = json.loads(tokenizer.backend_tokenizer.to_str())
        found["added_tokens"] = [token for token in found["added_tokens"] if token["id"] < shared]
        for name in ("padding", "truncation", "post_processor"):  # calls may leave padding and truncation switched on
            found.pop(name, None)
        return {"eos_token_id": tokenizer.eos_token_id, **found}

    return _first_difference(rules(own), rules(policy), "")


def _first_difference(own: object, policy: object, where: str) -> str | None:
    if own == policy:
        return None
    if isinstance(own, list) and isinstance(policy, list) and not isinstance((own + policy)[0], str):
        own, policy = dict(enumerate(own)), dict(enumerate(policy))
    if not (isinstance(own, dict) and isinstance(policy, dict)):
        return f"{where} is {str(own)[:_MAX_SHOWN]}, the policy's {str(policy)[:_MAX_SHOWN]}"
    key = next(key for key in (*own, *policy) if own.get(key) != policy.get(key))
    return _first_difference(own.get(key), policy.get(key), f"{where}.{key}" if where else str(key))
