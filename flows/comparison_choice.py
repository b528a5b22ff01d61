"""What `flows/compare_methods.py` is asked for: the comparison, its plan, and whether it can be begun."""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from luffy.pipeline.plan import StagePlan

from flows.front import Question
from luffy.cli.commands.plan import show_resources
from luffy.cli.console import text_table, wide_terminal
from luffy.config.comparison import SHARED_NODES, Comparison, load_comparison
from luffy.errors import EXIT_OK
from luffy.pipeline.experiment import open_experiment
from luffy.pipeline.workspace import Workspace

_EXAMPLES = """\
  python flows/compare_methods.py exp_configs/compare_arithmetic.yaml
  python flows/compare_methods.py exp_configs/compare_arithmetic.yaml seeds=[1,2] budget.optimizer_steps=30
  python flows/compare_methods.py exp_configs/compare_arithmetic.yaml --dry-run
"""


@dataclass(frozen=True)
class ComparisonWork:
    """A comparison as a command line asks for it."""

    comparison: Comparison
    parameters: Mapping[str, object] = field(default_factory=dict)

    def show_plan(self, workspace: Workspace, *, verify: bool) -> int:
        """Print what a run would do with each stage; what several runs share stands where it comes first."""
        for name in self.comparison.config.arms:
            show_resources(self.comparison.runs_of(name)[0].config, estimate=True)
        rows = [
            (title, plan.node.name, plan.identity.key, plan.headline, plan.reason)
            for title, plan in self._plans(workspace, verify)
        ]
        console = wide_terminal()
        console.print(f"workspace {workspace.root}", markup=False, soft_wrap=True)
        console.print(text_table(("run", "stage", "key", "plan", "why"), rows))
        return EXIT_OK

    def check(self, workspace: Workspace) -> None:
        """Raise UserError where a file is missing or the machine is too small."""
        for name in self.comparison.config.arms:
            config = self.comparison.runs_of(name)[0].config
            show_resources(config, estimate=False)
            # Finds missing files; the flow computes the keys.
            open_experiment(config, workspace, fingerprint=lambda stage: {})

    def plans(self, workspace: Workspace, *, verify: bool) -> list[StagePlan]:
        """What would be done, each stage once."""
        return [plan for _, plan in self._plans(workspace, verify)]

    def _plans(self, workspace: Workspace, verify: bool) -> Iterator[tuple[str, StagePlan]]:
        seen: set[str] = set()
        for run in self.comparison.runs:
            for plan in open_experiment(run.config, workspace, verify=verify).plan():
                if plan.node.name in run.nodes and plan.identity.key not in seen:
                    seen.add(plan.identity.key)
                    yield "all" if plan.node.name in SHARED_NODES else run.title, plan


def _work(options: argparse.Namespace) -> ComparisonWork:
    return ComparisonWork(load_comparison(options.config, options.overrides))


QUESTION = Question(
    examples=_EXAMPLES,
    config_help="a comparison's YAML, e.g. exp_configs/compare_arithmetic.yaml",
    work=_work,
)
