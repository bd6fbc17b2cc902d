"""A server as a child of this process: started on loopback, watched, ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.errors import Refused
from manymesh_sglang.arguments import died

LOOPBACK = "127.0.0.1"


class ServerProcess:
    """`python -m manymesh_sglang.launch`, in a session of its own.

    Attributes:
        port: that it will listen on.
        key: that it wants.

    Raises:
        Refused: the port that is asked for is taken.
    """

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], port: int) -> None:
        self.port, self.key = free_port(port), secrets.token_hex(16)
        handle, name = tempfile.mkstemp(prefix="manymesh-sglang-", suffix=".log")
        self._log = Path(name)
        with os.fdopen(handle, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "manymesh_sglang.launch"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        options = dict(arguments) | {"host": LOOPBACK, "port": self.port, "api_key": self.key}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it died at once: ask its log
            pipe.write(json.dumps({"parent": os.getpid(), "arguments": options}).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit(self) -> str:
        """How it ended, "" while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def explain(self) -> str:
        """How it ended, and the last lines of its log; "" while it lives."""
        return f"{end}, its last lines:\n{self.last_lines()}" if (end := self.exit()) else ""

    def last_lines(self, number: int = 20) -> str:
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-number:])
        return ""

    def check(self) -> None:
        """Raises ManymeshError where it has ended, with its last lines."""
        if explanation := self.explain():
            raise died(explanation)

    def end(self) -> None:
        """Kill it and all that it has started, and wait until they are gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                os.killpg(self._process.pid, 0)
            except (ProcessLookupError, PermissionError):
                break
            time.sleep(0.02)
        self._log.unlink(missing_ok=True)


def free_port(port: int) -> int:
    """The port, or any free one for 0. Raises Refused where it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError as error:
            raise Refused(
                "the port of the server is taken", have=f"{LOOPBACK}:{port}: {error}", mend="choose another, or 0"
            ) from error
        number: int = probe.getsockname()[1]
        return number
