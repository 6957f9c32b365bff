"""Imports single modules of a large package, without running its `__init__`."""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any, cast

_running = threading.RLock()


class _Package(ModuleType):
    """A package whose `__init__` runs when something is asked for that only it defines."""

    def __getattr__(self, name: str) -> Any:
        with _running:
            if type(self) is _Package:
                cast("Any", self).__class__ = ModuleType
                spec = self.__spec__
                assert spec is not None and spec.loader is not None
                spec.loader.exec_module(self)
        return getattr(self, name)


def import_lazily(name: str) -> None:
    """Make `import NAME.MODULE` import only that module, and what it imports itself.

    The package behaves as usual for everyone: the rest of it is imported when it is needed. Does
    nothing if the package has been imported, or is not installed.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.loader is not None:
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Package
        sys.modules[name] = package
