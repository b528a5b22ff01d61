"""`luffy serve`: Prefect's server with UI, a worker and the deployments."""

from typing import Annotated

from typer import Option

from luffy.cli.options import Debug, WorkspaceFolder
from luffy.pipeline.workspace import find_workspace


def serve(
    port: Annotated[int, Option(min=1, max=65535, help="port of the server")] = 4200,
    host: Annotated[
        str,
        Option(help="address to listen at; one that other machines can reach requires PREFECT_SERVER_API_AUTH_STRING"),
    ] = "127.0.0.1",
    name: Annotated[
        list[str] | None, Option(help="a further name of this machine that browsers use, e.g. of a proxy")
    ] = None,
    limit: Annotated[int, Option(min=1, help="runs at the same time; further runs wait")] = 1,
    end_with_parent: Annotated[
        bool, Option("--end-with-parent", help="end when the process that started this one ends")
    ] = False,
    workspace: WorkspaceFolder = None,
    debug: Debug = False,
) -> int:
    """Serve Prefect with its UI, a worker and the deployments on this machine."""
    from luffy.flows.serve import ServerAddress, serve_until_interrupted  # sets Prefect's environment before it starts

    address = ServerAddress(port, host, tuple(name or ()))
    return serve_until_interrupted(find_workspace(workspace), address, limit, end_with_parent=end_with_parent)
