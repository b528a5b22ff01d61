"""One more seed of the four arms in guided.yaml, added to what earlier calls found; for quarter_hour.py.

Run: python tests/gpu/guided.py FOLDER [--miniature]

FOLDER keeps the results of all calls, guided.results.parquet and guided.outcomes.parquet, and begins with those beside
this file. A call takes the first seed that they lack, so that one that was cut goes on in the same FOLDER, and makes
their tables anew. `--miniature`: two steps an arm with few and short responses, for a CPU.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from luffy.config.many_runs.sweep_runs import Sweep, load_sweep
from luffy.evaluation.across_runs.run_results import read_sweep_results, result_files
from luffy.evaluation.across_runs.sweep_findings import find
from luffy.report.page import markdown
from luffy.report.sweep_pages import study_page

HERE = Path(__file__).parent
TINY = [
    "model.dtype=float32",
    "rl.prompts_per_step=2",
    "evaluation.max_response_tokens=16",
    "evaluation.only=[shorter]",
    "execution.zero_stage=0",
]


def next_seed(sweep: Sweep) -> int:
    """The first from 1 for which the results lack an arm."""
    files = result_files(sweep.path, sweep.design.name)
    found = set[tuple[str, int]]()
    if files[0].is_file():
        rows = read_sweep_results(files).where(cell=["centre"], role=["reported"]).measures
        found = {*rows[["arm", "seed"]].itertuples(index=False, name=None)}
    return next(seed for seed in count(1) if any((arm, seed) not in found for arm in sweep.design.arms))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--miniature", action="store_true")
    given = parser.parse_args(argv)
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    design = Path(shutil.copy(HERE / "guided.yaml", folder))
    for file in () if given.miniature else HERE.glob("guided.*.parquet"):
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    settings = [f"seeds=[{next_seed(load_sweep(design))}]"]
    if given.miniature:
        text = design.read_text(encoding="utf-8").replace("optimizer_steps: 40", "optimizer_steps: 4")
        design.write_text(text.replace("sft_steps: 16", "sft_steps: 2"), encoding="utf-8")
        overrides = [*load_sweep(design).design.overrides, *TINY]
        settings += [f"overrides={overrides}", "primary={suite: shorter, decoding: greedy}"]
    workspace = str(folder / "workspace")
    command = [sys.executable, "-m", "luffy", "compare", str(design), *settings, "--workspace", workspace]
    code = subprocess.call([*command, "--cells", "centre"])
    if code == 2:  # a mistake in the design
        return code
    # What is finished counts, also where an arm has failed.
    subprocess.check_call([*command, "--collect", "--page"])
    study = load_sweep(design, settings)
    results = read_sweep_results(result_files(study.path, study.design.name))
    print(markdown(study_page(find(study, results), results)))
    return code


if __name__ == "__main__":
    sys.exit(main())
