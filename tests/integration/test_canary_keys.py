"""Keys that were made to be found: through every flow that holds one, and searched for afterwards wherever it could be.

The server listens at all addresses of the machine, so Prefect's own password is one of the keys. Another one, over
PostgreSQL, knows the password of its database.
"""

import base64
import json
import re
import signal
import threading
from contextlib import contextmanager

import httpx
import pytest
from serving import ENDED, LOOK_S, SHORT, Checkout, command_lines
from support.patience import PATIENCE_S, wait_until
from support.postgres import PROGRAMS, postgresql
from synthetic.endpoint import CHAT, Endpoint, by_seed, completion, mortal, refusal

pytestmark = pytest.mark.slow
PASSWORD = "canary-prefect-5c1e9f"
WRONG = "lab:canary-wrong-71d0aa"
KEYS = {
    "PREFECT_SERVER_API_AUTH_STRING": f"lab:{PASSWORD}",
    "TEACHER_KEY": "sk-canary-teacher-8b2d44",
    "JUDGE_KEY": "sk-canary-judge-0f6c13",
    "SERVED_KEY": "sk-canary-served-e47a90",
    "WANDB_API_KEY": "ca9a27" * 6 + "cafe",
}
TOKEN = base64.b64encode(KEYS["PREFECT_SERVER_API_AUTH_STRING"].encode()).decode()
CANARIES = [PASSWORD, TOKEN, WRONG, *list(KEYS.values())[1:]]
OF_POSTGRES = "canary-postgres-93ab1c"
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
BEFORE_IT_REFUSES = 3
TINY = "kind: arithmetic, num_operations: [1]"
SMALL = [
    f"data.train={{{TINY}, num_prompts: 6}}",
    f"data.suites={{small: {{{TINY}, num_prompts: 6}}}}",
    "evaluation.decodings={greedy: {temperature: 0.0}}",
    "base.steps=2",
    "sft={num_traces: 4, batch_size: 4, epochs: 1}",
    "tracking.wandb=offline",
]
LISTS = [
    *("flow_runs", "task_runs", "flows", "deployments", "artifacts", "logs", "events", "automations", "variables"),
    *("block_documents", "work_pools", "work_pools/luffy/workers", "concurrency_limits"),
]

# What a notebook of the run shows, written with its outputs.
NOTEBOOK = """
import nbclient, nbformat
cells = ["import luffy; run = luffy.load_runs()[-1]", "run.record", "run.accuracies", "run.metrics", "run.samples(3)"]
made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
nbclient.NotebookClient(made).execute()
assert all(cell.outputs for cell in made.cells[1:])
nbformat.write(made, "seen.ipynb")
"""


@contextmanager
def watched():
    """Yields the set that has, after the block, the command line of every process that was seen in it."""
    seen, over = set(), threading.Event()

    def watch():
        while not over.wait(0.1):
            seen.update(command_lines())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield seen
    over.set()
    watcher.join()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A checkout whose server all machines reach, with every key in the environment; `said` is what it has printed."""
    checkout = Checkout(tmp_path_factory.mktemp("canary"))
    ours = {"PREFECT_API_AUTH_STRING": KEYS["PREFECT_SERVER_API_AUTH_STRING"], "PYTHONUNBUFFERED": "1"}
    checkout.environment |= {**KEYS, **ours, "LUFFY_WORKSPACE": str(checkout.workspace)}
    process = checkout.start("--host", "0.0.0.0", "--name", "proxy.example")
    yield checkout
    process.send_signal(signal.SIGINT)
    checkout.said.append(process.communicate(timeout=PATIENCE_S)[0])
    assert process.returncode == 0
    assert not found_in_files(checkout) and not found_in("".join(checkout.said))


def found_in(text):
    return [canary for canary in CANARIES if canary in text]


def found_in_files(checkout, canaries=CANARIES):
    """Files of the checkout, the workspace (with Prefect's database) and the home directory that hold a key."""
    files = [path for path in checkout.root.parent.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    contents = {path: path.read_bytes() for path in files}
    return [path for path, content in contents.items() if any(canary.encode() in content for canary in canaries)]


def answers_of(checkout):
    """Everything that the API tells about what it knows, as one text."""
    with httpx.Client(headers={"Authorization": f"Basic {TOKEN}"}, timeout=PATIENCE_S) as client:
        lists = [client.post(f"{checkout.api}/{name}/filter", json={}) for name in LISTS]
        assert {answer.status_code for answer in lists} == {200}, [(a.url, a.text) for a in lists if a.is_error]
        settings = client.get(f"{checkout.api}/admin/settings")
    assert all(answer.json() for answer in lists[:7]) and settings.status_code == 200
    return "\n".join(answer.text for answer in (*lists, settings))


@pytest.fixture
def endpoints():
    """A teacher, a judge, and a model that refuses its key after some answers; each asks for its own key."""
    teacher = Endpoint(lambda path, body: completion("3 \\boxed{3}", prompt_tokens=5), (CHAT,), KEYS["TEACHER_KEY"])
    judge = Endpoint(lambda path, body: completion("VERDICT: CORRECT"), (CHAT,), KEYS["JUDGE_KEY"])
    repeating = refusal(401, f"Incorrect API key: {KEYS['SERVED_KEY']}")
    model = Endpoint(mortal(BEFORE_IT_REFUSES, by_seed, repeating), (CHAT,), KEYS["SERVED_KEY"])
    yield teacher, judge, model
    for endpoint in (teacher, judge, model):
        endpoint.close()


def overrides_with(teacher, judge):
    graded = f"kind: judge, url: '{judge.url}/v1', model: m, api_key_variable: JUDGE_KEY"
    asked = "big: {endpoint: {name: org/big}, max_response_tokens: 40, num_samples: 1}"
    return [
        *SMALL,
        "stages=[prepare_data, base, sample, evaluate, report]",  # SFT holds no other key than the base's training
        f"grading.kind={{{graded}}}",
        f"sample={{prompts: all, teachers: {{{asked}}}}}",
        f"execution.teachers={{big: {{urls: ['{teacher.url}'], api_key_variable: TEACHER_KEY}}}}",
    ]


def test_no_key_is_in_a_file_a_database_an_answer_a_notebook_an_export_or_a_process_list(served, endpoints):
    teacher, judge, model = endpoints
    place = served.workspace
    asked = {"overrides": [*overrides_with(teacher, judge), f"tracking.tensorboard={place}/events"]}
    at_model = ["--model", "api:org/x", "--url", f"{model.url}/v1"]
    its_key = "execution.server={api_key_variable: SERVED_KEY, max_retries: 0}"
    with watched() as commands:
        done = served.deploy("full-pipeline/smoke", asked, "--watch")
        refused = served.run("-m", "luffy", "evaluate", "exp_configs/smoke.yaml", *at_model, *SMALL, its_key)
        exported = served.run("-m", "luffy", "export", "smoke-1", str(place / "exported"))
        notebook = served.run("-c", NOTEBOOK)
    assert exported.returncode == notebook.returncode == 0, exported.stderr + notebook.stderr
    assert (place / "exported/README.md").is_file(), exported.stdout
    assert done.returncode == 0, done.stdout + done.stderr
    assert teacher.asked and judge.asked and list(served.workspace.rglob("*.wandb"))
    assert list(place.glob("events/*/events.out.tfevents.*"))
    assert refused.returncode != 0 and len(model.asked) > BEFORE_IT_REFUSES
    assert "status 401: Incorrect API key: ***" in refused.stderr, refused.stdout + refused.stderr
    printed = "".join((done.stdout, done.stderr, refused.stdout, refused.stderr, exported.stdout, *served.said))
    assert any("prefect worker" in command for command in commands), "the watcher saw nothing"
    assert not found_in("\n".join(commands))
    assert not found_in(printed)
    assert not found_in(answers_of(served))
    assert (place / "prefect" / "prefect.db").is_file()
    assert not found_in_files(served)


def test_a_flow_with_another_password_is_one_line_without_it(served):
    result = served.run("flows/full_pipeline.py", "exp_configs/smoke.yaml", *SMALL, PREFECT_API_AUTH_STRING=WRONG)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1), result.stderr
    assert "127.0.0.1 requires a name and password; export PREFECT_API_AUTH_STRING" in result.stderr
    assert not found_in(result.stdout + result.stderr) and not found_in_files(served)


def test_the_api_is_open_to_its_password_alone(served):
    for auth, status in ((None, 401), (("lab", "guess"), 401), (("lab", PASSWORD), 200)):
        for path in ("flow_runs/filter", "deployments/filter"):
            assert httpx.post(f"{served.api}/{path}", json={}, auth=auth, timeout=PATIENCE_S).status_code == status


def page(served, host, origin=None):
    """What the server answers to a page of `origin` that calls it `host`; with the password, so that it is not that."""
    headers = {"Host": host, "Authorization": f"Basic {TOKEN}", **({} if origin is None else {"Origin": origin})}
    return httpx.post(f"{served.api}/flow_runs/filter", json={}, headers=headers, timeout=PATIENCE_S).status_code


def test_foreign_pages_and_names_are_refused_by_the_real_server(served):
    own = f"127.0.0.1:{served.port}"
    assert page(served, own) == page(served, own, f"http://{own}") == 200
    assert page(served, "proxy.example", "https://proxy.example") == 200
    assert page(served, own, "http://evil.example") == page(served, own, "null") == 403
    assert page(served, f"evil.example:{served.port}", f"http://evil.example:{served.port}") == 403


def test_a_foreign_page_opens_no_websocket(served):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = f"ws://127.0.0.1:{served.port}/api/events/out"

    def greeted(origin):
        with connect(address, origin=origin, subprotocols=["prefect"], open_timeout=PATIENCE_S, proxy=None) as socket:
            socket.send(json.dumps({"type": "auth", "token": KEYS["PREFECT_SERVER_API_AUTH_STRING"]}))
            return json.loads(socket.recv(PATIENCE_S))["type"]

    assert greeted(None) == greeted(f"http://127.0.0.1:{served.port}") == "auth_success"
    with pytest.raises(InvalidStatus, match="403"):
        greeted("http://evil.example")


def test_the_ui_is_served_and_reaches_its_api_under_the_name_in_the_browser(served):
    address = served.api.removesuffix("/api")
    found = httpx.get(address, headers={"Accept": "text/html"}, follow_redirects=True, timeout=PATIENCE_S)
    assert found.status_code == 200 and re.search(r"<div id=.app", found.text)
    assert "frame-ancestors 'self'" in found.headers["content-security-policy"]
    settings = httpx.get(f"{address}/ui-settings", timeout=PATIENCE_S).json()
    assert (settings["api_url"], settings["auth"]) == ("/api", "BASIC")


@pytest.mark.skipif(PROGRAMS is None, reason="needs PostgreSQL's programs in /usr/lib/postgresql")
def test_runs_share_a_server_over_postgresql_and_its_password_is_found_nowhere(tmp_path):
    """Three at once, of which two may run."""
    checkout = Checkout(tmp_path, has_sqlite=False)
    with postgresql(OF_POSTGRES) as url:
        checkout.environment[DATABASE] = url
        process = checkout.start("--limit", "2")
        runs = [checkout.begin(SHORT) for _ in range(3)]
        most, commands = 0, set()

        def have_ended():
            nonlocal most
            states = [checkout.state(run) for run in runs]
            most = max(most, states.count("RUNNING"))
            commands.update(command_lines())
            return set(states) <= set(ENDED)

        wait_until(have_ended, every_s=LOOK_S)
        assert [checkout.state(run) for run in runs] == ["COMPLETED"] * 3
        assert 1 <= most <= 2
        logs = checkout.ask("logs/filter", limit=200)
        settings = httpx.get(f"{checkout.api}/admin/settings", timeout=PATIENCE_S).text
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0
    assert not (checkout.workspace / "prefect" / "prefect.db").exists()
    assert not found_in_files(checkout, [OF_POSTGRES])
    assert OF_POSTGRES not in "".join([*commands, said, settings, json.dumps(logs)])


def test_a_database_that_is_not_there_ends_in_one_line_without_the_password(tmp_path):
    checkout = Checkout(tmp_path, has_sqlite=False)
    result = checkout.run(
        *("flows/serve.py", "--port", str(checkout.port), "--workspace", str(checkout.workspace)),
        **{DATABASE: f"postgresql+asyncpg://prefect:{OF_POSTGRES}@127.0.0.1:9/prefect"},
    )
    assert result.returncode == 1
    assert "the Prefect server did not start" in result.stderr and result.stderr.count("\n") == 1
    assert OF_POSTGRES not in result.stdout + result.stderr
    assert not found_in_files(checkout, [OF_POSTGRES])
