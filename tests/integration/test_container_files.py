"""The files of deploy/ for containers: their schemas, the names that they use, and the entry point of the image."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from luffy.cli.main import app
from luffy.flows.serve import _GRACE_S
from luffy.pipeline.workspace import WORKSPACE_VARIABLE

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
POD = next(each for each in MANIFESTS if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "luffy")
SPEC = POD["spec"]["template"]["spec"]
SERVICES = [COMPOSE["services"][name] for name in ("luffy", "luffy-gpu")]
SECRETS = {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_DATABASE_CONNECTION_URL"}
COMMANDS = [json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])]
COMMANDS += [SPEC["containers"][0]["args"], *(each["command"] for each in SERVICES)]


def test_the_health_check_imports_what_there_is():
    exec(re.search(r'"-c", "(from \S+ import \w+);', DOCKERFILE)[1], {})


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_of_a_container_is_one_of_luffy_with_options_that_exist(command):
    program, name, *arguments = command
    options = {option for each in typer.main.get_command(app).commands[name].params for option in each.opts}
    assert program == "luffy"
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_a_container_gets_the_variables_that_luffy_and_prefect_read(monkeypatch):
    from prefect.settings import Settings

    for name in SECRETS:
        monkeypatch.setenv(name, f"value:{name}")
    server = Settings().server
    read = {server.api.auth_string.get_secret_value(), server.database.connection_url.get_secret_value()}
    assert read == {f"value:{name}" for name in SECRETS}
    container = {each["name"] for each in SPEC["containers"][0]["env"]}
    assert container == SECRETS | {WORKSPACE_VARIABLE}
    for service in SERVICES:
        assert set(service["secrets"]) == SECRETS and set(service["environment"]) == {WORKSPACE_VARIABLE}
    assert set(COMPOSE["secrets"]) == {*SECRETS, "POSTGRES_PASSWORD"}


def test_paths_user_and_port_are_the_same_in_image_compose_and_kubernetes():
    container = SPEC["containers"][0]
    workspace = re.search(r"LUFFY_WORKSPACE=(\S+)", DOCKERFILE)[1]
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert f"VOLUME {workspace}" in DOCKERFILE and values[WORKSPACE_VARIABLE] == workspace
    assert workspace in {each["mountPath"] for each in container["volumeMounts"]}
    assert f"USER {SPEC['securityContext']['runAsUser']}:{SPEC['securityContext']['runAsGroup']}" in DOCKERFILE
    assert "EXPOSE 4200" in DOCKERFILE and container["ports"] == [{"containerPort": 4200}]
    for service in SERVICES:
        assert service["environment"][WORKSPACE_VARIABLE] == workspace
        assert service["volumes"] == [f"workspace:{workspace}"] and service["ports"] == ["127.0.0.1:4200:4200"]


def test_a_container_that_ends_has_longer_than_the_server_gives_its_runs():
    assert SPEC["terminationGracePeriodSeconds"] > _GRACE_S
    assert all(int(service["stop_grace_period"].removesuffix("s")) > _GRACE_S for service in SERVICES)


def test_no_file_holds_a_password():
    for path in DEPLOY.iterdir():
        if path.is_file() and path.suffix != ".md":
            assert not re.search(r"://[^/\s]+:[^/\s]+@|PASSWORD: ?[^/\s{]", path.read_text()), path.name


def test_everything_that_the_image_copies_is_let_through_by_its_ignore_file():
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?([\w./]+\w) /", DOCKERFILE, re.MULTILINE)
    assert {"constraints.txt", "deploy/container.sh"} == set(copied) and set(copied) <= set(kept)
    assert all((DEPLOY.parent / path).exists() for path in kept)


def test_the_entry_point_turns_secrets_into_variables_and_becomes_the_command(tmp_path):
    (tmp_path / "PREFECT_SERVER_API_AUTH_STRING").write_text("lab:a b'c\"$d\n")
    (tmp_path / "POSTGRES_PASSWORD").write_text("of another service")
    code = "import json, os; print(json.dumps([os.getpid(), dict(os.environ)]))"
    process = subprocess.Popen(
        [str(DEPLOY / "container.sh"), sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], "LUFFY_SECRETS": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid, environment = json.loads(process.communicate()[0])
    assert pid == process.pid  # so that SIGTERM reaches the command
    assert environment["PREFECT_SERVER_API_AUTH_STRING"] == "lab:a b'c\"$d"
    assert "POSTGRES_PASSWORD" not in environment
