"""Making stores known to transformers. Imports neither torch nor transformers: whoever imports those has paid for them.

transformers keeps quantization methods in a table that `quantizer` enters when it is imported, and a store that it does
not find there is loaded with random experts. So the entry is made as soon as that table exists: now, or right after the
module that holds it has been imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

TABLE = "transformers.quantizers.auto"


class _AfterImport(MetaPathFinder):
    """Wait for one module to be imported, by the ordinary finders, and then be gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _register()

        loader.exec_module = exec_module
        return spec


def register() -> None:
    """Enter foregate into transformers' quantization methods, now or as soon as they are there."""
    if TABLE in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _register() -> None:
    import_module(".quantizer", __package__)
