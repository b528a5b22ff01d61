"""Export of a checkpoint as a plain Hugging Face folder, without DeepSpeed."""

from pathlib import Path

from luffy.config.model import DType
from luffy.training.base_model import copy_tokenizer
from luffy.training.piece_files import PieceKey, PieceReader
from luffy.training.policy import load_causal_lm
from luffy.training.policy_model import PolicyModel


def export_checkpoint(checkpoint: Path, start: Path, tokenizer: Path, dtype: DType, folder: Path) -> None:
    """Write the policy of `checkpoint` to `folder`: safetensors, configurations, tokenizer and chat template.

    `start` is the stage's initial model folder, which gives the architecture. Runs in one process, whatever the number
    of ranks that wrote the checkpoint. Raises CheckpointError for a broken checkpoint.
    """
    causal_lm = load_causal_lm(start, dtype)
    stored = PieceReader(checkpoint / "policy")
    for name, parameter in PolicyModel(causal_lm, temperature=1.0, chunk_tokens=1).named_parameters():
        stored.read(PieceKey("weight", 0, name), parameter.detach().view(-1))
    causal_lm.save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
