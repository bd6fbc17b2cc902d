"""What a server's process runs: `python -m manymesh_sglang.launch`, with its arguments as JSON on standard input.

It ends with the process that started it; SGLang's own processes end with this one.
"""

from __future__ import annotations

import json
import sys

from manymesh.parts.parent_watch import end_with


def main() -> None:
    request = json.load(sys.stdin)
    end_with(request["parent"])
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    run_server(ServerArgs(**request["arguments"]))


if __name__ == "__main__":
    main()
