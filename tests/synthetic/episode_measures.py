"""Measures of episodes, as a user writes them."""

import asyncio
import threading

EVENT = threading.Event()
"""Set it to let `hangs` end."""
MEETING, LOCK, RUNNING = threading.Barrier(16), threading.Lock(), []


def words(completion):
    return len(" ".join(turn["content"] for turn in completion if turn["role"] == "assistant").split())


def as_in_verifiers(completion, **kwargs):
    return len(completion) * kwargs["info"]["level"]


async def is_right(completion, answer):
    return completion[-1]["content"] == answer


def breaks(counts):
    raise ValueError("no measure today")


def hangs(answer):
    EVENT.wait()


def meets_fifteen_others(answer):
    """How many ran at the same time, once there are sixteen."""
    with LOCK:
        RUNNING.append(1)
    MEETING.wait()
    found = len(RUNNING)
    MEETING.wait()
    with LOCK:
        RUNNING.pop()
    MEETING.wait()
    return found


async def never_comes(answer):
    await asyncio.Event().wait()


def says_nothing(task):
    return None


def wants_a_parser(parser):
    return 1.0
