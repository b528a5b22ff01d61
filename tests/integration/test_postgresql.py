"""`luffy serve` over a real PostgreSQL: several runs at once within the limit, and a password that is kept."""

import json
import signal
import urllib.request

import pytest
from support.patience import PATIENCE_S, wait_until
from support.postgres import PROGRAMS, postgresql
from test_serve import ENDED, LOOK_S, SHORT, Checkout, command_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAMS is None, reason="needs PostgreSQL's programs in /usr/lib/postgresql"),
]
PASSWORD = "canary-postgres-93ab1c"
RUNS, LIMIT = 3, 2
URL = "PREFECT_SERVER_DATABASE_CONNECTION_URL"


def files_with(text, root):
    paths = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path for path in paths if text.encode() in path.read_bytes()]


def test_runs_share_a_server_over_postgresql_and_its_password_is_found_nowhere(tmp_path):
    checkout = Checkout(tmp_path)
    with postgresql(PASSWORD) as url:
        checkout.environment[URL] = url
        process = checkout.start("--limit", str(LIMIT))
        runs = [checkout.begin(SHORT) for _ in range(RUNS)]
        most, commands = 0, set()

        def have_ended():
            nonlocal most
            states = [checkout.state(run) for run in runs]
            most = max(most, states.count("RUNNING"))
            commands.update(command_lines())
            return set(states) <= set(ENDED)

        wait_until(have_ended, every_s=LOOK_S)
        assert [checkout.state(run) for run in runs] == ["COMPLETED"] * RUNS
        assert 1 <= most <= LIMIT
        logs = checkout.ask("logs/filter", limit=200)
        with urllib.request.urlopen(f"{checkout.api}/admin/settings", timeout=PATIENCE_S) as answer:
            settings = answer.read().decode()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0
    assert not (checkout.workspace / "prefect" / "prefect.db").exists()
    assert not files_with(PASSWORD, tmp_path)
    assert not any(PASSWORD in command for command in commands)
    assert PASSWORD not in said + settings + json.dumps(logs)


def test_a_database_that_is_not_there_ends_in_one_line_without_the_password(tmp_path):
    checkout = Checkout(tmp_path)
    result = checkout.run(
        *("flows/serve.py", "--port", str(checkout.port), "--workspace", str(checkout.workspace)),
        **{URL: f"postgresql+asyncpg://prefect:{PASSWORD}@127.0.0.1:9/prefect"},
    )
    assert result.returncode == 1
    assert "the Prefect server did not start" in result.stderr and result.stderr.count("\n") == 1
    assert PASSWORD not in result.stdout + result.stderr
    assert not files_with(PASSWORD, tmp_path)
