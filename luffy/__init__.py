"""luffy: off-policy-guided reinforcement learning of language models as cached, restartable stages.

In notebooks, `luffy.load_results(workspace)` and `luffy.load_problem_results(workspace)` return evaluations as
DataFrames.
"""

from importlib import import_module

__version__ = "0.1.0"
_LAZY = {"load_results": "luffy.evaluation.frames", "load_problem_results": "luffy.evaluation.frames"}


def __getattr__(name: str) -> object:
    """Import what a notebook asks for; `import luffy` alone loads nothing."""
    if name not in _LAZY:
        raise AttributeError(f"module 'luffy' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
