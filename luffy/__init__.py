"""luffy: off-policy-guided reinforcement learning of language models as cached, restartable stages.

In notebooks, `luffy.load_results(workspace)` and `luffy.load_problem_results(workspace)` return evaluations as
DataFrames.
"""

from importlib import import_module

__version__ = "0.2.0"
_FRAMES = ("load_results", "load_problem_results")


def __getattr__(name: str) -> object:
    """Import what a notebook asks for; `import luffy` alone loads nothing."""
    if name not in _FRAMES:
        raise AttributeError(f"module 'luffy' has no attribute {name!r}")
    # Named relatively: every stage's fingerprint reads this file, and must not take it for an import of evaluation.
    return getattr(import_module(".evaluation.frames", __name__), name)
