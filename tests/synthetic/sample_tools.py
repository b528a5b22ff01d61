"""Functions that tests load as tools, by `synthetic.sample_tools:name`."""

import asyncio
import enum
import functools
import threading
from collections.abc import Callable
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


def refuse(reason: str) -> str:
    """Raise an exception with the reason."""
    raise LookupError(reason)


def leave() -> str:
    """End the process, or try to."""
    raise SystemExit(3)


def half_asynchronous() -> object:
    """Return a coroutine that nobody can await in a thread."""
    return slow_echo("a", 0.0)


def explain() -> str:
    """Raise an error whose text is shown as it is."""
    raise ToolError("Traceback: all of it")


def lose_service() -> str:
    """Raise the exception of a service that is gone."""
    raise LostError("the service is gone")


def fail_for_good() -> str:
    """Raise an error of luffy's own, which is no message for the policy."""
    raise LuffyError("the service refuses")


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


async def refuse_later() -> str:
    """Raise an exception, asynchronously."""
    await asyncio.sleep(0)
    raise LookupError("later")


async def cancel_itself() -> str:
    """Raise the exception by which asyncio cancels."""
    raise asyncio.CancelledError


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
    kept = [*state.get("kept", ()), text]  # type: ignore[misc]
    state["kept"] = kept
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

    state.on_close(lambda: CLOSED.append("first"))
    state.on_close(fail)
    state.on_close(close_later)
    return "opened"


def logged(function: Callable[..., object]) -> Callable[..., object]:
    """A decorator."""

    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return wrapper


@logged
def decorated(number: int) -> int:
    """Double a number."""
    return 2 * number


@functools.lru_cache
def cached(number: int) -> int:
    """Triple a number."""
    return 3 * number


def without_type(a, b: int) -> int:  # type: ignore[no-untyped-def]
    """Lacks an annotation."""
    return int(a) + b


def without_docstring(a: int) -> int:
    return a


def of_a_tuple(pair: tuple[int, int]) -> int:
    """Takes a tuple."""
    return sum(pair)


def with_rest(*numbers: int) -> int:
    """Takes any number of arguments."""
    return sum(numbers)


def with_wrong_default(number: int = None) -> int:  # type: ignore[assignment]  # noqa: RUF013
    """Has a default of another type."""
    return number


def with_stale_docs(number: int) -> int:
    """Describes a parameter that is gone.

    Args:
        numbre: The number.
    """
    return number


def with_positional_state(state: EpisodeState) -> str:
    """Takes the state where the policy could pass it."""
    return str(state)


def of_a_missing_type(number: "Missing") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Has an annotation that does not exist."""
    return number


def in_steps(number: int):  # type: ignore[no-untyped-def]
    """Yields."""
    yield number


NUMBER = 3
