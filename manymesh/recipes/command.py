"""What the recipes' commands have in common."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from core.errors import ManymeshError

INTERRUPTED = 130  # what a shell gives for Ctrl-C


def run_guarded(command: Callable[[], int], *, verbose: bool = False) -> int:
    """Run a command; our own errors are printed without Python's traceback and give 1."""
    # Bars for each file that transformers writes or reads, and torch's word on a function it renamed.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    try:
        return command()
    except ManymeshError as error:
        if verbose:
            traceback.print_exc()
        else:
            print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if verbose:
            traceback.print_exc()
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
