"""With this folder on PYTHONPATH, Python processes import changed modules of luffy; `mutations.py` says which.

`MUTATED=FILE` names a marshalled dictionary: `modules`, the code of each changed module by name; `preset`, a YAML file
and the text that it is read as; `hits`, a file whose bytes changed code may set, one for each line that it executes.
The sources on disk stay as they are, and with them all that reads them, such as the keys of stages.
"""

import builtins
import marshal
import mmap
import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


class MutatedFinder(MetaPathFinder):
    """Finds the usual modules, with the code and the preset of the plan."""

    def __init__(self, modules: dict[str, CodeType], preset: tuple[str, str] | None) -> None:
        self.modules, self.preset = modules, preset

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """The usual module, changed; None for all others."""
        reads_preset = self.preset is not None and fullname == "luffy.config.yaml_source"
        if fullname not in self.modules and not reads_preset:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if reads_preset:
            spec.loader.exec_module = self.with_preset(spec.loader.exec_module)
        else:
            spec.loader.get_code = lambda name: self.modules[fullname]
        return spec

    def with_preset(self, run: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        """Run the module; then its `read_yaml` returns the values of the plan, and the lines of the file."""

        def run_and_change(module: ModuleType) -> None:
            run(module)
            read = module.read_yaml
            name, text = self.preset

            def read_changed(path: Path) -> tuple[dict[str, Any], Any]:
                values, origins = read(path)
                return (module.parse_scalar(text) if Path(path).resolve() == Path(name) else values), origins

            module.read_yaml = read_changed

        return run_and_change


if "MUTATED" in os.environ:
    plan = marshal.loads(Path(os.environ["MUTATED"]).read_bytes())
    if plan["hits"]:
        with Path(plan["hits"]).open("r+b") as file:
            builtins.HITS = mmap.mmap(file.fileno(), 0)
    sys.meta_path.insert(0, MutatedFinder(plan["modules"], plan["preset"]))
