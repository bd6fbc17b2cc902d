"""An end with another process's: what a worker starts must not outlive it, not even when it is killed."""

from __future__ import annotations

import os
import select
import signal
import threading
import time


def end_with(pid: int) -> None:
    """Kill this process as soon as process `pid`, its parent, has ended. Returns at once.

    Not by the kernel's own signal for that, which comes as soon as the parent's thread ends that started this one.
    """
    threading.Thread(target=_watch, args=(pid,), name="end with parent", daemon=True).start()


def _watch(pid: int) -> None:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except (AttributeError, OSError):  # not Linux, or an old one
        while os.getppid() == pid:
            time.sleep(0.5)
    else:
        while not select.select([handle], [], [], 60)[0]:
            pass
    os.kill(os.getpid(), signal.SIGKILL)
