"""Several rows of one problem become one prompt with the traces of all of them.

    write_merged(folder, rows, selection)

Which row gets what is known from the selection; the texts are carried in two passes, a shard in memory at a time: first
every shard leaves the traces it gives in the mailboxes of those that take them, then each of these is written anew:

    00007.mail.jsonl        traces for rows of the shard, in the order of the rows they come from
    00007.merged.parquet    the shard with them, in place of 00007.parquet
"""

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from luffy.data.parquet import iterate_prompts, write_prompts
from luffy.data.selection import PassedRows, Selection
from luffy.data.shards import finished_shards
from luffy.types import Prompt, Trace

MERGED = ".merged.parquet"
_MAIL = ".mail.jsonl"


def write_merged(folder: Path, rows: PassedRows, selection: Selection) -> None:
    """Write the shards under `folder` whose rows take over traces; what an earlier attempt left is written anew."""
    for stale in [*folder.glob(f"*{_MAIL}"), *folder.glob(f"*{MERGED}")]:
        stale.unlink()
    if not selection.taken.any() or not selection.folded.any():
        return
    accounts = finished_shards(folder)
    starts = [0, *itertools.accumulate(rows.shard_rows)]
    for shard, account in enumerate(accounts):
        for target, lines in _letters(account, rows, selection, starts, shard).items():
            with accounts[target].with_suffix(_MAIL).open("a", encoding="utf-8") as letters:
                letters.writelines(lines)
    for account in accounts:
        mailbox = account.with_suffix(_MAIL)
        if mailbox.is_file():
            write_prompts(account.with_suffix(MERGED), _with_mail(account, mailbox))
            mailbox.unlink()


def _letters(
    account: Path, rows: PassedRows, selection: Selection, starts: list[int], shard: int
) -> dict[int, list[str]]:
    """What the rows of a shard give away, by the shard that takes it."""
    letters: dict[int, list[str]] = defaultdict(list)
    first, end = starts[shard], starts[shard + 1]
    folded = selection.folded[first:end]
    if not folded.any():
        return letters
    ends = np.cumsum(rows.num_traces)
    givers = (np.flatnonzero(folded) + first).tolist()
    for row, prompt in zip(givers, itertools.compress(_prompts(account), folded), strict=True):
        owner = int(selection.owners[row])
        target = int(np.searchsorted(starts, owner, side="right")) - 1
        taken = selection.taken[ends[row] - rows.num_traces[row] : ends[row]]
        for trace in itertools.compress(prompt.traces, taken):
            letter = (owner - starts[target], trace.text, trace.author, trace.verified, trace.logprobs)
            letters[target].append(json.dumps(letter) + "\n")
    return letters


def _with_mail(account: Path, mailbox: Path) -> Iterator[Prompt]:
    """The shard's rows with the traces that came for them."""
    arrived: dict[int, list[Trace]] = defaultdict(list)
    with mailbox.open(encoding="utf-8") as lines:
        for line in lines:
            row, text, author, verified, logprobs = json.loads(line)
            arrived[row].append(Trace(text, author, verified, None if logprobs is None else tuple(logprobs)))
    for row, prompt in enumerate(_prompts(account)):
        yield dataclasses.replace(prompt, traces=(*prompt.traces, *arrived[row])) if row in arrived else prompt


def _prompts(account: Path) -> Iterator[Prompt]:
    return iterate_prompts(account.with_suffix(".parquet"))
