"""Weights from one process to another against a plain copy of their bytes: `python -m benchmarks.weight_transfer`.

| case | ours | floor |
|---|---|---|
| transfer-collective | one sync of 100 MB by broadcast (gloo on CPU) | one copy of 100 MB from buffer to buffer |
| transfer-ipc | the same through memory that both share | the same |
| transfer-object_store | the same through Ray's object store | the same |
| transfer-disk | the same through files | the same |
| digest | the digest of 100 MB | the same |

A sync is all of it: names, export, cutting, the link, joining, loading into the model, digests on both sides, and the
agreement of all ends. It moves every byte several times (out of the trainer, into a bucket, through the kernel or
shared memory, into the model), where the floor moves it once: the ratio says how many plain copies' time a sync takes.
Sender and receiver are actors that hold tensors in place of engines, so that nothing else is measured. How long each
end took and waited for the link is printed below the table (medians, ms).

`--receivers 512` measures something else: what so many receivers ask of the sender's store, with no weights. Each is a
thread with a connection of its own. It prints the operations of all receivers and of the sender, and the milliseconds,
each by bucket.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._pairs import Case, measure, report
from benchmarks._store_load import measure_store
from benchmarks._transfer_workers import BYTES, Receiver, Sender

KINDS = ("collective", "ipc", "object_store", "disk")


def main() -> None:
    parser = argparse.ArgumentParser(description="Time weight transfers against a plain copy.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--bucket-mb", type=float, default=32)
    parser.add_argument("--receivers", type=int, help="only what so many receivers ask of the store, by bucket")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if args.receivers:
        figures = measure_store(args.receivers, 20)
        print(json.dumps(figures) if args.json else "\n".join(f"{k:45} {v:8.1f}" for k, v in figures.items()))
        return

    import ray
    import torch

    from core.group import RayClassWithInitArgs
    from core.transport.ray import RayResourcePool, RayWorkerGroup
    from manymesh.workers import WeightSync
    from manymesh.workers.transfer.digest import digest

    torch.set_num_threads(1)
    source, target = torch.ones(BYTES // 4), torch.empty(BYTES // 4)
    copy = _copy(target, source)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    env = {"OMP_NUM_THREADS": "1"}
    cases: list[Case] = []
    waits: dict[str, list[float]] = defaultdict(list)
    with (
        tempfile.TemporaryDirectory() as folder,
        RayResourcePool([1], use_gpu=False) as one,
        RayResourcePool([1], use_gpu=False) as other,
        RayWorkerGroup(one, RayClassWithInitArgs(Sender), env=env) as sender,
        RayWorkerGroup(other, RayClassWithInitArgs(Receiver), env=env) as receiver,
    ):
        for kind in args.kinds:
            options = {"directory": str(Path(folder) / "weights")} if kind == "disk" else {}
            with WeightSync(sender, [receiver], kind=kind, options=options, bucket_mb=args.bucket_mb) as sync:
                name = f"transfer-{kind}"
                cases.append(measure(name, copy, _sync_and_wait(sync, waits, name), args.pairs))
    cases.append(measure("digest", copy, lambda: int(digest(source)), args.pairs))
    ray.shutdown()
    report(cases, args.json)
    if not args.json:
        for label, times in waits.items():
            print(f"{label:45} {1e3 * median(times):8.1f}")


def _copy(target: Any, source: Any) -> Callable[[], object]:
    return lambda: target.copy_(source)


def _sync_and_wait(sync: Any, waits: dict[str, list[float]], name: str) -> Callable[[], object]:
    def run() -> None:
        sync.sync()
        for receipt in sync.receipts:
            end = "sender" if receipt.end == "sender" else "receiver"
            waits[f"{name}: {end}, in all"].append(receipt.seconds)
            waits[f"{name}: {end}, waited for the link"].append(receipt.waited)

    return run


if __name__ == "__main__":
    main()
