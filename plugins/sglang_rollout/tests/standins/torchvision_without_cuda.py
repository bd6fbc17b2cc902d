"""Lets torchvision be imported beside a torch that is built for CPU.

The package index has torchvision for CUDA alone: its compiled operators don't load here, and its Python stops where it
describes two of them. So their schemas are declared first, when somebody imports torchvision, and not before. They have
no implementation: calling one raises torch's own error.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from typing import Any

SCHEMA = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it is asked first, and steps aside."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch

        if torch.cuda.is_available():
            raise ImportError(
                "manymesh-sglang-standins is for machines without CUDA: pip uninstall manymesh-sglang-standins"
            )
        self.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                self.library.define(operator + SCHEMA)
        torch._manymesh_torchvision_schemas = self.library  # they last as long as the library does
        return importlib.util.find_spec(name)


sys.meta_path.insert(0, BeforeTorchvision())
