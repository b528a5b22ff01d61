"""A whole program in a session: with a namespace, a standard input and no standard error of its own.

`_run` and `plain` are sent to the session as text.
"""

import builtins
import functools
import importlib
import inspect
import re
from typing import Any

_LENT = "typing collections heapq bisect math itertools functools string re random copy operator statistics json sys"


def code_of_run(program: str, given: str = "", then: str = "") -> str:
    """The call of a session that runs `program` with the text `given` as standard input.

    What it prints is the call's output. With `then`, which runs after it in its namespace, the last line of the output
    is the value of `_value` (see `plain`); `_called(name)` is the program's function or method of `Solution`.
    """
    return f"{_harness()}_run({program!r}, {_lent_names(program)!r}, {given!r}, {then!r})\nNone"


@functools.cache
def _harness() -> str:
    return "Any = object\n" + inspect.getsource(plain) + inspect.getsource(_run)


def plain(value: object) -> str:
    """A value as JSON text, also in the sandbox: a tuple as a list, a set in order, any other object as its `repr`."""
    import json

    def other(each: object) -> object:
        return ["set", *sorted(map(text, each))] if isinstance(each, (set, frozenset)) else repr(each)

    def text(each: object) -> str:
        try:
            return json.dumps(each, default=other)
        except (TypeError, ValueError):
            return json.dumps(repr(each))

    return text(value)


def _run(program: str, lent: str, given: str, then: str) -> None:
    """Runs in the session."""
    import atexit
    import builtins
    import json
    import os
    import sys

    import __main__

    def called(name: str | None) -> Any:
        owner = vars(space["Solution"]) if "Solution" in space else {}
        name = name or next(each for each in owner if not each.startswith("_"))
        return getattr(space["Solution"](), name) if name in owner else space[name]

    space = vars(__main__)
    show = space["plain"]
    space.clear()
    space.update(__name__="__main__" if not then else "program", __builtins__=builtins)
    sys.modules["program"] = __main__
    stdin = os.open(os.environ["HOME"] + "/stdin", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    os.write(stdin, given.encode(errors="replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - the program may read it at any time
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        exec(lent, space)  # noqa: S102
        exec(compile(program, "<program>", "exec", dont_inherit=True), space)  # noqa: S102
        if then:
            space |= {"_called": called, "json": json}
            exec(compile(then, "<test>", "exec", dont_inherit=True), space)  # noqa: S102
    except SystemExit:
        if then:
            raise RuntimeError("it ended before the test did") from None
        raise
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os.dup2(stderr, 2)
        for fd in (stdin, stderr, nowhere):
            os.close(fd)
    if then:
        print("\n" + show(space["_value"]))  # noqa: T201


@functools.lru_cache(maxsize=64)
def _lent_names(program: str) -> str:
    """Imports of what a program uses and may not import itself: the runners of those data sets provide it."""
    words, taken, lines = set(re.findall(r"\w+", program)), set(dir(builtins)), []
    for name in _LENT.split():
        public = words & {each for each in dir(importlib.import_module(name)) if each[0] != "_"} - taken
        lines += [f"import {name}"] * (name in words) + [f"from {name} import {each}" for each in sorted(public)]
        taken |= public
    return "\n".join(lines)
