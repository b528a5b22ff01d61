"""An address that others reach is served with a password, or not at all; the password stays in the environment."""

import os

import httpx
import pytest

from luffy.cli.main import main
from luffy.errors import UserError
from luffy.flows.launch import call_flow
from luffy.flows.prefect_api import ServerAddress, guard, is_loopback, share_auth_string

SERVER, CLIENT = "PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING"
GOOD = "lab:correct-horse-battery"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Neither variable, and what a test sets is gone after it."""
    for name in (SERVER, CLIENT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "192.0.2.7", ""])
def test_an_address_that_others_reach_is_refused_without_a_password(host, capsys):
    assert main(["serve", "--host", host]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"error: --host {host}:"), said
    assert "export PREFECT_SERVER_API_AUTH_STRING='NAME:PASSWORD'" in said or not host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1"])
def test_the_loopback_address_needs_none(host):
    guard(host)
    assert SERVER not in os.environ and is_loopback(host)


@pytest.mark.parametrize("tell", [lambda: guard("127.0.0.1"), share_auth_string])
def test_an_empty_one_is_none(environment, tell):
    environment.setenv(SERVER, "")
    environment.setenv(CLIENT, "")
    tell()
    assert SERVER not in os.environ and CLIENT not in os.environ
    environment.setenv(SERVER, "")
    with pytest.raises(UserError, match="export"):
        guard("0.0.0.0")


@pytest.mark.parametrize(
    ("variable", "tell"),
    [(SERVER, lambda: guard("0.0.0.0")), (CLIENT, lambda: guard("0.0.0.0")), (SERVER, share_auth_string)],
)
def test_either_variable_is_that_of_server_and_clients(environment, variable, tell):
    environment.setenv(variable, GOOD)
    tell()
    assert (os.environ[SERVER], os.environ[CLIENT]) == (GOOD, GOOD)


@pytest.mark.parametrize(
    "value", ["nocolon", ":password-alone", "lab:", "lab:short", "lab:with blank in it", "läb:1234567890ab"]
)
def test_a_weak_or_malformed_one_is_refused_without_being_shown(environment, value):
    environment.setenv(SERVER, value)
    with pytest.raises(UserError) as caught:
        guard("0.0.0.0")
    assert value not in str(caught.value) and "\n" not in str(caught.value)


def test_two_that_differ_are_refused(environment):
    environment.setenv(SERVER, GOOD)
    environment.setenv(CLIENT, GOOD + "x")
    with pytest.raises(UserError, match="differ"):
        guard("127.0.0.1")


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1/api"), ("::", "http://[::1]:1/api"), ("192.0.2.7", "http://192.0.2.7:1/api")],
)
def test_programs_on_this_machine_reach_a_server_of_any_address(host, url):
    assert ServerAddress(1, host).url == url


def test_a_server_that_asks_for_a_password_is_one_line():
    def flow():
        request = httpx.Request("POST", "http://gpu1:4200/api/flows/")
        raise httpx.HTTPStatusError("401\nFor more", request=request, response=httpx.Response(401, request=request))

    with pytest.raises(UserError, match="gpu1 requires a name and password; export PREFECT_API_AUTH_STRING") as caught:
        call_flow(flow, {}, None)
    assert "\n" not in str(caught.value)
