"""Host of an environment of the package verifiers; run by the interpreter that has the package.

PYTHON verifiers_host.py          # JSON lines on standard input and output; `verifiers_process.py` speaks them
"""

import asyncio
import importlib
import importlib.util
import os
import random
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luffy.hosted.foreign.exchange import Channel, HostedEnvironment

_SEED = 0


def load(environment: str, arguments: dict[str, Any]) -> "HostedEnvironment":
    """The environment by the interface that this version of verifiers has; Unusable if it cannot be used."""
    from luffy.hosted.foreign.exchange import Unusable

    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError as error:
        raise Unusable(f"{sys.executable} cannot import verifiers ({error}); install it there") from error
    try:
        is_classic = hasattr(verifiers, "load_environment")
    except ImportError:
        is_classic = False
    if is_classic:
        from luffy.hosted.foreign.classic_environments import load_classic

        return load_classic(verifiers, environment, arguments)
    from luffy.hosted.foreign.task_sets import load_task_set

    return load_task_set(environment, arguments)


async def _host(number: int, environment: "HostedEnvironment", channel: "Channel") -> None:
    from luffy.hosted.foreign.exchange import serve

    channel.send(number, ok=await environment.open())
    await serve(environment, channel)


def main() -> None:
    """Load the environment that the first line names, and serve it."""
    # `luffy.hosted` without luffy, whose dependencies this interpreter does not have.
    here = Path(__file__).resolve().parent
    for name, folder in {"luffy": here.parent, "luffy.hosted": here}.items():
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = [str(folder)]
    from luffy.hosted.foreign.exchange import Channel, EpisodeFault, Unusable

    channel = Channel()
    request = channel.receive()
    if request is None:
        return
    # Nothing beside this file, or in the working directory, may shadow an installed package.
    sys.path[:] = [*sys.path[1:], request["directory"]]
    # An environment that draws its tasks without a seed has the same ones in every process.
    random.seed(_SEED)
    if importlib.util.find_spec("numpy") is not None:
        importlib.import_module("numpy").random.seed(_SEED)
    try:
        asyncio.run(_host(request["id"], load(request["environment"], request["arguments"]), channel))
    except (Unusable, EpisodeFault) as error:
        if error.__cause__ is not None:
            traceback.print_exc()
        channel.send(request["id"], refused=str(error))
        return
    sys.stdout.flush()
    os._exit(0)  # threads of the environment may never end


if __name__ == "__main__":
    main()
