"""Reward models with a head, loaded into this process: a sequence classifier scores whole conversations.

A score does not depend on what else is scored, but for the rounding of the model's type: rows are sorted by length and
padded on the right, and no attention reaches the padding. Nothing is remembered between calls, so that a resumed stage,
which grades its batches again, gets the same bits.
"""

import gc
import logging
import math
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from luffy.config.execution import ExecutionConfig
from luffy.config.grading import RewardModelGrader
from luffy.config.model import check_classifier
from luffy.errors import ConfigError, DataError, first_line
from luffy.grading.request import Grade, RewardRequest
from luffy.types import Message, Outcome

logger = logging.getLogger(__name__)


class RewardModel:
    """One of them on its device. Raises as `check_classifier` does; ConfigError where the device is not there or full,
    DataError where weights are missing."""

    def __init__(self, kind: RewardModelGrader, device: str | None) -> None:
        folder, where = Path(kind.path).expanduser(), f"grading: {kind.path}"
        check_classifier(folder, where)
        self._where = where
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
            found = AutoModelForSequenceClassification.from_pretrained(
                folder, dtype=getattr(torch, kind.dtype), local_files_only=True, use_safetensors=True,
                trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
            model, loaded = cast(Any, found)  # its annotation knows the model alone
        except Exception as error:  # noqa: BLE001 - a folder with senseless contents raises anything in transformers
            raise DataError(f"{where}: is no model that can be loaded ({first_line(error)})") from None
        if lacking := sorted(loaded["missing_keys"]):
            raise DataError(f"{where}: lacks {len(lacking)} weights of its model, the first is {lacking[0]}")
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        try:
            self._model = model.eval().to(self._device)
        except (AssertionError, RuntimeError) as error:  # also out of memory
            raise ConfigError(
                f"{where}: cannot be put on {self._device} ({first_line(error)}); set execution.reward_device to cpu "
                "or another GPU, its dtype to bfloat16, or lower execution.vllm.gpu_memory_utilization"
            ) from None
        config = model.config.get_text_config()
        self._positions: int | None = getattr(config, "max_position_embeddings", None)
        self._padding: int | None = config.pad_token_id
        """Where it is None the model takes the last token of a row for the end of the text: one row at a time."""
        special = [re.escape(token) for token in self._tokenizer.all_special_tokens]
        self._special = re.compile("|".join(sorted(special, key=len, reverse=True)) or r"(?!)")
        logger.info("reward model %s on %s in %s", kind.path, self._device, kind.dtype)
        self.encode((Message("user", "1"), Message("assistant", "1")))

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], int]:
        """The last tokens of a conversation that the model has room for, and the number of all.

        DataError where the chat template refuses it. A control token that the response spells out is split: it would
        otherwise write turns of its own.
        """
        *before, reply = ({"role": each.role, "content": each.content} for each in messages)
        reply["content"] = self._special.sub(lambda found: f"{found[0][0]} {found[0][1:]}", reply["content"])
        try:  # transformers runs it in Jinja's immutable sandbox
            text = self._tokenizer.apply_chat_template([*before, reply], tokenize=False)
        except Exception as error:  # noqa: BLE001 - a template is a program, which may raise anything
            raise DataError(
                f"{self._where}: its chat template cannot write a conversation ({first_line(error)})"
            ) from None
        ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return ids[-(self._positions or len(ids)) :], len(ids)

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]], batch_tokens: int) -> list[float]:
        """One score for each row of tokens, in order; a forward pass has at most `batch_tokens`, or one row."""
        found = [0.0] * len(rows)
        for places in self._batches(rows, batch_tokens):
            tokens = [torch.tensor(rows[place], dtype=torch.long) for place in places]
            input_ids_BT = pad_sequence(tokens, batch_first=True, padding_value=self._padding or 0)
            mask_BT = pad_sequence([torch.ones_like(each) for each in tokens], batch_first=True)
            output = self._model(input_ids=input_ids_BT.to(self._device), attention_mask=mask_BT.to(self._device))
            for place, score in zip(places, output.logits[:, 0].float().tolist(), strict=True):
                found[place] = score
        return found

    def _batches(self, rows: Sequence[Sequence[int]], batch_tokens: int) -> Iterator[list[int]]:
        batch: list[int] = []
        for place in sorted(range(len(rows)), key=lambda place: len(rows[place])):
            if batch and (self._padding is None or (len(batch) + 1) * len(rows[place]) > batch_tokens):
                yield batch
                batch = []
            batch.append(place)
        if batch:
            yield batch


class RewardModels:
    """The reward models of a pool, each loaded when it is first needed. May be shared by threads."""

    def __init__(self, execution: ExecutionConfig) -> None:
        self._execution = execution
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, str], RewardModel] = {}

    def load(self, kind: RewardModelGrader) -> RewardModel:
        key = kind.path, kind.dtype
        if key not in self._loaded:
            self._loaded[key] = RewardModel(kind, self._execution.reward_device)
        return self._loaded[key]

    def grade(self, requests: Sequence[RewardRequest]) -> dict[RewardRequest, Grade]:
        """The grade of each request; a score that is no finite number is `crashed`."""
        grades: dict[RewardRequest, Grade] = {}
        with self._lock:
            for kind in dict.fromkeys(request.kind for request in requests):
                model, of_kind = self.load(kind), [request for request in requests if request.kind == kind]
                encoded = [model.encode(request.messages) for request in of_kind]
                scores = model.scores([ids for ids, _ in encoded], self._execution.micro_batch_tokens)
                for request, (ids, total), score in zip(of_kind, encoded, scores, strict=True):
                    outcome = Outcome.CORRECT if score >= kind.correct_from else Outcome.WRONG
                    grade = Grade(outcome, None, f"the reward model gives {score:.6g}", own_reward=score)
                    if not math.isfinite(score):
                        grade = Grade(Outcome.CRASHED, None, f"the reward model gives {score}", own_reward=math.nan)
                    elif len(ids) < total:
                        grade = grade.saying(f"its last {len(ids)} of {total} tokens")
                    grades[request] = grade
        return grades

    def close(self) -> None:
        """Free their memory."""
        with self._lock:
            if self._loaded:
                self._loaded.clear()
                gc.collect()
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
