"""luffy: off-policy-guided reinforcement learning of language models as cached, restartable stages.

run = luffy.run("arithmetic", method="luffy", seed=1)   # as on the command line; a finished stage is reused
run.metrics, run.accuracies, run.samples(), run.model(), run.report
luffy.load_runs(), luffy.load_results(), luffy.load_problem_results(), luffy.grade(response, reference)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from luffy.api.runs import Run, load_runs, run
    from luffy.api.single_grades import grade
    from luffy.errors import ConfigError, DataError, LuffyError, UserError
    from luffy.evaluation.across_runs.all_results import load_problem_results, load_results

__version__ = "0.2.0"
__all__ = [
    "ConfigError",
    "DataError",
    "LuffyError",
    "Run",
    "UserError",
    "grade",
    "load_problem_results",
    "load_results",
    "load_runs",
    "run",
]
_ROOMS = {
    "grade": "api.single_grades",
    "load_problem_results": "evaluation.across_runs.all_results",
    "load_results": "evaluation.across_runs.all_results",
}
_ROOMS |= dict.fromkeys(("Run", "load_runs", "run"), "api.runs")


def __getattr__(name: str) -> object:
    """Import what is asked for: `import luffy` alone loads nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'luffy' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
