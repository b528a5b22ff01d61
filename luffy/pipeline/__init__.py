"""Stage identity, chains, plans, processes and the workspace: all of caching and restart, without Prefect or torch."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

_ROOMS = {
    "chain": "graph walk identity fingerprint module_facts outside differences plan reuse job manifest checkpoints "
    "provenance",
    "machine": "processes supervise gpus memory architecture resources warm_start warm_server events",
    "workspace": "records retention garbage needs disposal disk space claims lock",
}
_MOVED = {f"{__name__}.{old}": f"{__name__}.{room}.{old}" for room, names in _ROOMS.items() for old in names.split()}


class _FormerNames(MetaPathFinder, Loader):
    """Finds modules by the names that they had before they were sorted into rooms; until all imports are rewritten."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in _MOVED else None

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(_MOVED[spec.name])
        self._specs[module.__name__] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]


sys.meta_path.append(_FormerNames())
