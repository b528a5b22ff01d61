"""Adds traces to training data: the files of prepare_data, with more traces and the rows that these make usable.

    written = add_traces(out, data_folder, traces_of, config, seed)

A prompt keeps its own traces, in front of the new ones. A prompt that had lost all of its traces joins the training
rows if it gets a new one, else it stays in the complement. SFT's rows are chosen as prepare_data chooses them.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from luffy.config.data import DataConfig
from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.splits import EMPTY_COMPLEMENT, write_luffy
from luffy.errors import DataError
from luffy.files import link_or_copy
from luffy.seeds import derive_seed
from luffy.types import Origin, Prompt, Trace

TRAIN, SFT, COMPLEMENT, VALIDATION = "train.parquet", "sft.parquet", "rl_complement.parquet", "validation.parquet"
_LUFFY = "train.luffy.parquet"


@dataclass(frozen=True, slots=True)
class WrittenData:
    """What `add_traces` wrote."""

    files: tuple[str, ...]
    train_rows: int
    sft_rows: int
    traces: Mapping[str, int]
    """Number of added traces by author (`author:origin` where the data was rewritten); texts that the prompt already
    had are not added."""
    with_logprobs: Mapping[str, int]
    """Number of added traces with log-probabilities, by author."""
    origins: Mapping[str, int]
    """Traces of the training rows by origin; empty where the data was not rewritten."""


def prompts_without_their_traces(folder: Path) -> Iterator[Prompt]:
    """Prompts of prepare_data's complement that are not among its training rows: no trace of theirs was usable."""
    training = {prompt.uid for prompt in iterate_prompts(folder / TRAIN)}
    return (prompt for prompt in iterate_prompts(folder / COMPLEMENT) if prompt.uid not in training)


def add_traces(
    out: Path,
    folder: Path,
    added: Callable[[str], Sequence[Trace]],
    data: DataConfig,
    seed: int,
    *,
    rewrites: bool = False,
) -> WrittenData:
    """Write the training data in `folder` with the traces that `added` gives each uid to `out`.

    With `rewrites` they take the place of those that the prompt came with, which stay only where there are none.
    DataError if SFT requires more examples than there are, or RL learns from the complement and it is empty.
    """

    traces, with_logprobs, origins = Counter[str](), Counter[str](), Counter[str]()

    def extended() -> Iterator[tuple[Prompt, tuple[Trace, ...]]]:
        late = (prompt for prompt in prompts_without_their_traces(folder) if added(prompt.uid))
        for prompt in itertools.chain(iterate_prompts(folder / TRAIN), late):
            fresh = _new_to(prompt, added(prompt.uid))
            kept = _rewritten(prompt, fresh) if rewrites else (*prompt.traces, *fresh)
            yield dataclasses.replace(prompt, traces=kept), fresh

    def rows() -> Iterator[Prompt]:
        return (prompt for prompt, _ in extended())

    def counted() -> Iterator[Prompt]:
        for prompt, fresh in extended():
            traces.update(_signed(trace) for trace in fresh)
            with_logprobs.update(_signed(trace) for trace in fresh if trace.logprobs is not None)
            origins.update(str(trace.origin) for trace in prompt.traces if trace.origin is not None)
            yield prompt

    train_rows = write_prompts(out / TRAIN, counted())
    chosen = _chosen_for_sft(rows, data, seed)
    sft = (_for_sft(prompt, data) for prompt in rows() if prompt.uid in chosen)
    sft_rows = write_prompts(out / SFT, sft)
    others = (prompt for prompt in rows() if prompt.uid not in chosen)
    lost = (prompt for prompt in prompts_without_their_traces(folder) if not added(prompt.uid))
    bare = (dataclasses.replace(prompt, traces=()) for prompt in itertools.chain(others, lost))
    if not write_prompts(out / COMPLEMENT, bare) and data.rl == "complement":
        raise DataError(EMPTY_COMPLEMENT)
    files = [TRAIN, SFT, COMPLEMENT]
    if (folder / VALIDATION).is_file():
        link_or_copy(str(folder / VALIDATION), str(out / VALIDATION))
        files.append(VALIDATION)
    if data.luffy_parquet:
        write_luffy(out / _LUFFY, out / TRAIN)
        files.append(_LUFFY)
    return WrittenData(tuple(files), train_rows, sft_rows, traces, with_logprobs, origins)


def _signed(trace: Trace) -> str:
    return trace.author if trace.origin is None else f"{trace.author}:{trace.origin}"


def _rewritten(prompt: Prompt, fresh: tuple[Trace, ...]) -> tuple[Trace, ...]:
    """The fresh traces, or the expert's own where there are none."""
    return fresh or tuple(dataclasses.replace(trace, origin=Origin.EXPERT) for trace in prompt.traces)


def _new_to(prompt: Prompt, added: Sequence[Trace]) -> tuple[Trace, ...]:
    known = {trace.text for trace in prompt.traces}
    return tuple(trace for trace in added if trace.text not in known)


def _chosen_for_sft(rows: Callable[[], Iterator[Prompt]], data: DataConfig, seed: int) -> set[str]:
    """Uids of SFT's rows, as `luffy.data.selection.choose_for_sft` chooses them."""
    candidates = [prompt.uid for prompt in rows() if _for_sft(prompt, data).traces]
    wanted = data.sft.unique_train_examples
    if wanted == "all":
        return set(candidates)
    if wanted > len(candidates):
        raise DataError(
            f"data.sft.unique_train_examples: {wanted} asked for, {len(candidates)} training prompts have a trace, "
            "those of teachers included"
        )
    return set(sorted(candidates, key=lambda uid: derive_seed(seed, "sft-view", uid))[:wanted])


def _for_sft(prompt: Prompt, data: DataConfig) -> Prompt:
    if not data.sft.correct_only:
        return prompt
    return dataclasses.replace(prompt, traces=tuple(trace for trace in prompt.traces if trace.verified))
