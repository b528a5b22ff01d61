"""Prefect's server as luffy starts it: Prefect's own application, which answers its own pages alone.

Uvicorn imports it, in the process of the server: `uvicorn --factory luffy.flows.prefect_server:create_app`.
"""

import os

from luffy.flows.own_pages import Application, OwnPages, ServerNames

NAMES_VARIABLE = "LUFFY_SERVER_NAMES"
"""Names under which the server may be called, separated by commas."""


def create_app() -> Application:
    """The application; Prefect's settings come from the environment."""
    from prefect.server.api.server import create_app as create_prefect_app

    return OwnPages(create_prefect_app(), ServerNames.of(os.environ.get(NAMES_VARIABLE, "").split(",")))
