"""Folders of tiny reward models: a Qwen2 with a head, random or made to count a digit."""

from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from synthetic.arithmetic import tiny_tokenizer

TEMPLATE = "{% for m in messages %}<|bos|>{{ m.role }}: {{ m.content }}<|eos|>\n{% endfor %}"


def reward_folder(
    folder: Path, *, outputs: int = 1, head: bool = True, padded: bool = True, template: str | None = TEMPLATE
) -> Path:
    """A random one in float32, with so many outputs; without a `head` it is a language model."""
    torch.manual_seed(3)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        num_labels=outputs,
        pad_token_id=tokenizer.pad_token_id if padded else None,
    )
    kind: type[PreTrainedModel] = Qwen2ForSequenceClassification if head else Qwen2ForCausalLM
    model = kind(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)  # scores that differ in more than the last digits
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
