"""Screenshots for the README and the site, from a real run: the report, and the run in the Prefect UI.

Run: make docs-pictures           (after `make pipeline`; needs Chromium: `apt-get install chromium`)
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from PIL import Image

from luffy.flows.prefect_api import free_port

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
BROWSER_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_S = 120.0


def main() -> None:
    """Take the pictures of the newest run of an experiment, and of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", type=Path, default=ROOT / "workspace")
    parser.add_argument("--experiment", default="arithmetic")
    parser.add_argument("--comparison", help="name of a finished comparison, whose page is taken, too")
    arguments = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("pictures: no Chromium on the path; install it, e.g. apt-get install chromium")
    run, is_default = newest_run(arguments.workspace, arguments.experiment), arguments.experiment == "arithmetic"
    if is_default:
        take(browser, (run / "report.html").resolve().as_uri(), IMAGES / "report.png", height=1150)
    if arguments.comparison:
        compared = newest_run(arguments.workspace, arguments.comparison) / "comparison.html"
        take(browser, compared.resolve().as_uri(), IMAGES / "comparison.png", height=1100)
    port = free_port()
    serve = [sys.executable, "-m", "luffy", "serve", "--port", str(port), "--workspace", arguments.workspace]
    server = subprocess.Popen(serve, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        flow_run = newest_flow_run(f"http://127.0.0.1:{port}/api", arguments.experiment)
        page = f"http://127.0.0.1:{port}/runs/flow-run/{flow_run}"
        name = "run" if is_default else arguments.experiment
        take(browser, page, IMAGES / f"prefect_{name}.png", height=545, settle_ms=20_000)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE_S)


def newest_run(workspace: Path, experiment: str) -> Path:
    """The directory of the experiment's last run."""
    runs = sorted(workspace.glob(f"runs/{experiment}-*"), key=lambda path: path.stat().st_mtime)
    if not runs:
        sys.exit(f"pictures: no run of {experiment} in {workspace}; make one first: make pipeline")
    return runs[-1]


def newest_flow_run(api: str, experiment: str) -> str:
    """Id of the experiment's last completed run, once the server answers."""
    query = {
        "sort": "START_TIME_DESC",
        "limit": 1,
        "flow_runs": {"tags": {"all_": [f"experiment:{experiment}"]}, "state": {"type": {"any_": ["COMPLETED"]}}},
    }
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            found = httpx.post(f"{api}/flow_runs/filter", json=query, timeout=10.0).raise_for_status().json()
        except httpx.HTTPError:
            time.sleep(1)
            continue
        if not found:
            sys.exit(f"pictures: the server knows no completed run of {experiment}")
        return str(found[0]["id"])
    sys.exit(f"pictures: {api} did not answer within {PATIENCE_S:.0f} s")


def take(browser: str, url: str, image: Path, height: int, settle_ms: int = 3000) -> None:
    """Photograph a page at 1400 pixels of width, and keep the picture small."""
    with tempfile.TemporaryDirectory() as profile:
        size = (f"--window-size=1400,{height}", f"--virtual-time-budget={settle_ms}")
        command = [browser, *BROWSER_FLAGS, *size, f"--user-data-dir={profile}", f"--screenshot={image}", url]
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
    Image.open(image).convert("RGB").quantize(128).save(image, optimize=True)


if __name__ == "__main__":
    main()
