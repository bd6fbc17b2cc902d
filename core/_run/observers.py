"""Telling observers of calls. Nobody listens by default, and then it costs a look at an empty tuple."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pluggy

from core._run import observer_hooks
from core.hookspecs import PROJECT


class Observers:
    """Objects with methods marked `core.hookimpl`, named as the hooks in core.hookspecs.

    One that raises is logged, once for each hook, and hurts neither the call nor the others.
    """

    def __init__(self, observers: Sequence[object] = ()) -> None:
        self.all = tuple(observers)
        self._managers = []
        self._logged: set[tuple[int, str]] = set()
        for observer in observers:
            manager = pluggy.PluginManager(PROJECT)
            manager.add_hookspecs(observer_hooks)
            manager.register(observer)
            manager.check_pending()
            self._managers.append(manager)

    def __bool__(self) -> bool:
        return bool(self.all)

    def of_workers(self) -> tuple[object, ...]:
        """Those that also listen in the workers, and so are sent to them."""
        hooks = ("manymesh_before_method", "manymesh_after_method")
        return tuple(each for each in self.all if any(hasattr(each, hook) for hook in hooks))

    def tell(self, hook: str, **facts: Any) -> None:
        for number, manager in enumerate(self._managers):
            try:
                getattr(manager.hook, hook)(**facts)
            except Exception:
                if (number, hook) not in self._logged:
                    self._logged.add((number, hook))
                    logging.getLogger(PROJECT).exception("observer %r failed in %s", self.all[number], hook)
