"""The files of deploy/: those for containers agree with luffy and each other; scripts run with stand-ins."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml
from support.patience import PATIENCE_S, wait_until

from luffy.cli.main import application
from luffy.flows.serve import _GRACE_S
from luffy.pipeline.workspace import WORKSPACE_VARIABLE

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
POD = next(each for each in MANIFESTS if each["kind"] == "StatefulSet" and each["metadata"]["name"] == "luffy")
SPEC = POD["spec"]["template"]["spec"]
CONTAINER = SPEC["containers"][0]
SERVICES = [COMPOSE["services"][name] for name in ("luffy", "luffy-gpu")]
SECRETS = {"PREFECT_SERVER_API_AUTH_STRING", "PREFECT_SERVER_DATABASE_CONNECTION_URL"}
COMMANDS = [json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])]
COMMANDS += [CONTAINER["args"], *(each["command"] for each in SERVICES)]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_command_of_a_container_is_one_of_luffy_with_options_that_exist(command):
    program, name, *arguments = command
    options = {option for each in typer.main.get_command(application()).commands[name].params for option in each.opts}
    assert program == "luffy"
    assert {argument for argument in arguments if argument.startswith("--")} <= options


def test_a_container_gets_the_variables_that_luffy_and_prefect_read(monkeypatch):
    from prefect.settings import Settings

    for name in SECRETS:
        monkeypatch.setenv(name, f"value:{name}")
    server = Settings().server
    read = {server.api.auth_string.get_secret_value(), server.database.connection_url.get_secret_value()}
    assert read == {f"value:{name}" for name in SECRETS}
    assert {each["name"] for each in CONTAINER["env"]} == SECRETS | {WORKSPACE_VARIABLE}
    for service in SERVICES:
        assert set(service["secrets"]) == SECRETS and set(service["environment"]) == {WORKSPACE_VARIABLE}
    assert set(COMPOSE["secrets"]) == {*SECRETS, "POSTGRES_PASSWORD"}


def test_image_compose_and_kubernetes_agree_and_hold_no_password():
    exec(re.search(r'"-c", "(from \S+ import \w+);', DOCKERFILE)[1], {})  # the health check
    workspace = re.search(r"LUFFY_WORKSPACE=(\S+)", DOCKERFILE)[1]
    values = {each["name"]: each.get("value") for each in CONTAINER["env"]}
    assert f"VOLUME {workspace}" in DOCKERFILE and values[WORKSPACE_VARIABLE] == workspace
    assert workspace in {each["mountPath"] for each in CONTAINER["volumeMounts"]}
    assert f"USER {SPEC['securityContext']['runAsUser']}:{SPEC['securityContext']['runAsGroup']}" in DOCKERFILE
    assert "EXPOSE 4200" in DOCKERFILE and CONTAINER["ports"] == [{"containerPort": 4200}]
    # A container that ends has longer than the server gives its runs.
    assert SPEC["terminationGracePeriodSeconds"] > _GRACE_S
    for service in SERVICES:
        assert service["environment"][WORKSPACE_VARIABLE] == workspace
        assert service["volumes"] == [f"workspace:{workspace}"] and service["ports"] == ["127.0.0.1:4200:4200"]
        assert int(service["stop_grace_period"].removesuffix("s")) > _GRACE_S
    kept = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    copied = re.findall(r"^COPY (?:--chmod=\d+ )?([\w./]+\w) /", DOCKERFILE, re.MULTILINE)
    assert {"constraints.txt", "deploy/container.sh"} == set(copied) and set(copied) <= set(kept)
    assert all((DEPLOY.parent / path).exists() for path in kept)
    for path in DEPLOY.iterdir():
        if path.is_file() and path.suffix != ".md":
            assert not re.search(r"://[^/\s]+:[^/\s]+@|PASSWORD: ?[^/\s{]", path.read_text()), path.name


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


# A job of Slurm


STANDS_IN = {
    "luffy": """#!/usr/bin/env bash
asked=0
trap 'asked=$((asked + 1)); touch "$SEEN/asked$asked"' TERM
echo "$@" > "$SEEN/started"
[ "$CODE" ] && exit "$CODE"
while [ ! -e "$SEEN/saved" ]; do read -r -t 0.02 _ < "$SEEN/never"; done
exit 75
""",
    "scontrol": '#!/usr/bin/env bash\necho "$@" > "$SEEN/requeued"\n',
}


@pytest.fixture
def job(tmp_path):
    """Starts the script as Slurm does; the stand-in for the run ends with a code, or once `saved` is there."""
    os.mkfifo(tmp_path / "never")
    keeps_open = os.open(tmp_path / "never", os.O_RDWR)
    for name, text in STANDS_IN.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(tmp_path), "SLURM_JOB_ID": "17"}
    command = [str(DEPLOY / "slurm.sh"), "smoke", "rl.steps=8"]
    yield lambda code: subprocess.Popen(command, env={**os.environ, **own, "CODE": code})
    os.close(keeps_open)


def test_a_job_that_is_asked_to_end_twice_passes_it_on_waits_for_its_run_and_goes_back_into_the_queue(job, tmp_path):
    process = job("")
    wait_until((tmp_path / "started").exists)
    for asked in ("asked1", "asked2"):
        process.terminate()
        wait_until((tmp_path / asked).exists)
    (tmp_path / "saved").touch()
    assert process.wait(PATIENCE_S) == 75
    assert (tmp_path / "started").read_text() == "run smoke rl.steps=8\n"
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("code", ["0", "2"])
def test_a_finished_or_failed_run_is_not_started_again(job, tmp_path, code):
    assert job(code).wait(PATIENCE_S) == int(code)
    assert not (tmp_path / "requeued").exists()
