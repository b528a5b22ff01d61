"""Functions that tests load as tools, by `synthetic.sample_tools:name`."""

import asyncio
import enum
import functools
import threading
from typing import Annotated, Literal

from luffy.environments import EpisodeState, ToolError
from luffy.errors import LostError, LuffyError

RELEASED = threading.Event()
"""Lets the calls of `hang` return."""
CLOSED: list[str] = []
"""What the callbacks of finished episodes left."""


class Unit(enum.Enum):
    KM = "km"
    MILES = "miles"


def weather(location: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> str:
    """Weather at a place.

    Args:
        location: City and country.
        unit: Unit of
            the temperature.
    """
    return f"20 degrees {unit} in {location}"


def every_type(
    text: str,
    count: int,
    share: float,
    flag: bool,
    numbers: list[int],
    names: dict[str, list[str]],
    unit: Unit,
    maybe: Annotated[int | None, "A number, or null."] = None,
    level: Literal[1, 2] = 1,
) -> object:
    """Return what it was given."""
    return [text, count, share, flag, numbers, names, unit.value, maybe, level]


def echo(text: str) -> str:
    """Return the text."""
    return text


def nothing() -> None:
    """Take no arguments, return nothing."""


def structure(size: int) -> dict[str, object]:
    """Return an object."""
    return {"größe": size, "list": [None, True]}


def raising(error, is_async=False):
    """A tool that raises this."""

    def tool() -> str:
        """Raise an exception."""
        raise error

    async def tool_of_the_loop() -> str:
        """Raise an exception, asynchronously."""
        await asyncio.sleep(0)
        raise error

    return tool_of_the_loop if is_async else tool


refuse = raising(LookupError("why"))
refuse_at_length = raising(LookupError("x" * 5000))
refuse_later = raising(LookupError("later"), is_async=True)
leave = raising(SystemExit(3))
cancel_itself = raising(asyncio.CancelledError(), is_async=True)
explain = raising(ToolError("Traceback: all of it"))
lose_service = raising(LostError("the service is gone"))
fail_for_good = raising(LuffyError("the service refuses"))


def half_asynchronous() -> object:
    """Return a coroutine that nobody can await in a thread."""
    return slow_echo("a", 0.0)


def hang() -> str:
    """Wait until the test releases it."""
    RELEASED.wait()
    return "released"


def thread_name() -> str:
    """Return the name of the thread it runs in."""
    return threading.current_thread().name


async def slow_echo(text: str, seconds: float) -> str:
    """Return the text after some time."""
    await asyncio.sleep(seconds)
    return text


async def stubborn() -> str:
    """Ignore being cancelled, for a while."""
    for _ in range(3):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return "late"


def remember(text: str, *, state: EpisodeState) -> int:
    """Keep a text and return how many there are."""
    state["kept"] = kept = [*state.get("kept", ()), text]
    if len(kept) == 1:
        state.on_close(lambda: CLOSED.append(state.problem.data_source))
    return len(kept)


def open_things(*, state: EpisodeState) -> str:
    """Open a few things that are closed with the episode."""

    async def close_later() -> None:
        await asyncio.sleep(0)
        CLOSED.append("asynchronous")

    def fail() -> None:
        raise OSError("cannot be closed")

    for closing in (lambda: CLOSED.append("first"), fail, close_later):
        state.on_close(closing)
    return "opened"


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@functools.wraps(double)
def decorated(*args: object, **kwargs: object) -> object:
    return double(*args, **kwargs)


cached = functools.lru_cache(double)


def with_stale_docs(number: int) -> int:
    """Describes a parameter that is gone.

    Args:
        numbre: The number.
    """
    return number


NUMBER = 3
