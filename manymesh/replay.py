"""Store what a rank receives, and run it again in one process: `python -m manymesh.replay DIRECTORY --rank 1 [--pdb]`.

    RayWorkerGroup(pool, RayClassWithInitArgs(MyWorker), observers=[Recorder("calls", ranks=[1])])

Each rank that is recorded gets a folder with what its worker was made from and every call that reached it: method,
mesh, arguments, shard, place in the world, the states of the random number generators, and a digest of the answer. The
replay makes the worker, repeats its calls in order, and compares the last one's answer to the bit.

What cannot be replayed: a method that meets its peers in a collective (there are none; the worker's init_process_group
refuses, and so does the replay); what a constructor draws from generators that it does not seed itself; files, clocks
and servers. An answer is not compared where the rank's was not collected, or its rows stayed with the workers. Records
are pickles: replay only your own.
"""

from __future__ import annotations

import argparse
import pdb
import pickle
import random
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from ray import cloudpickle

from core._calls.calls import Order, RankCall
from core._rows.wire import contents, decode, digests, encode, mapped
from core._run.host import WorkerHost
from core._run.transport import Answered, Outcome, Raised, RefusedIt
from core.errors import Refused, did_you_mean
from core.hookspecs import hookimpl
from core.worker import WorkerContext, placed


@attrs.frozen
class Record:
    """A call as it reached a rank."""

    context: WorkerContext
    order: Order
    call: RankCall
    generators: Mapping[str, Any]


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


@attrs.define
class Recorder:
    """Observer of a group that stores the calls of some ranks.

    Args:
        directory: where every rank's process can write.
        ranks: whose; None for all.
    """

    directory: str = attrs.field(converter=_absolute)
    ranks: Collection[int] | None = None
    _numbers: dict[int, int] = attrs.field(factory=dict, init=False)

    @hookimpl
    def manymesh_before_method(self, host: WorkerHost, order: Order, call: RankCall) -> None:
        if self.ranks is not None and host.context.rank not in self.ranks:
            return
        rank, folder = host.context.rank, _folder(self.directory, host.context.rank)
        if rank not in self._numbers:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()
            (folder / "made").write_bytes(cloudpickle.dumps(host.made))
        number = self._numbers[rank] = self._numbers.get(rank, 0) + 1
        record = Record(attrs.evolve(host.context, listener=None), order, _here(call, host), _generators())
        (folder / f"{number:06d}.call").write_bytes(cloudpickle.dumps(record))

    @hookimpl
    def manymesh_after_method(self, host: WorkerHost, order: Order, outcome: Outcome) -> None:
        rank = host.context.rank
        if self.ranks is None or rank in self.ranks:
            collected = isinstance(outcome, Answered) and outcome.value is not None and not order.keep
            answer = digests(contents([outcome.value])) if collected else None  # type: ignore[union-attr]
            name = f"{self._numbers[rank]:06d}.answer"
            (_folder(self.directory, rank) / name).write_bytes(pickle.dumps(answer))


def _folder(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}"


def _here(call: RankCall, host: WorkerHost) -> RankCall:
    """The call with rows that lie elsewhere fetched."""
    module = sys.modules.get("core._rows.remote")

    def of(value: Any) -> Any:
        return encode(value.rows(host.fetch)) if module is not None and isinstance(value, module.Fetch) else value

    return RankCall(mapped(call.args, of), mapped(dict(call.kwargs), of), call.shard)


def _generators() -> dict[str, Any]:
    """States of the generators that are in use."""
    states: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore(states: Mapping[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(states["torch"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(states["cuda"])


@attrs.frozen
class Replayed:
    """What a replay came to. `equal` is None where there is no answer to compare with."""

    method: str
    answer: Any
    equal: bool | None


def replay(directory: str | Path, rank: int, *, call: int | None = None, debug: bool = False) -> Replayed:
    """Repeat a rank's calls up to number `call` (from 1; the last where not given).

    Args:
        debug: stop in pdb at the first line of the last call's method.

    Raises:
        Refused: nothing was recorded of that rank or call, or a method needs its peers.
        Exception: whatever the method raises.
    """
    folder = _folder(directory, rank)
    numbers = [int(file.stem) for file in sorted(folder.glob("*.call"))]
    if not numbers:
        known = [each.name for each in Path(directory).glob("rank-*")]
        raise Refused(f"there is no record of rank {rank}", where=str(directory), mend=did_you_mean(folder.name, known))
    last = numbers[-1] if call is None else call
    if last not in numbers:
        raise Refused(f"there is no call {last}", want=f"1..{numbers[-1]}", where=str(folder))
    host = WorkerHost()
    cls, args, kwargs = pickle.loads((folder / "made").read_bytes())
    for number in numbers[:last]:
        record: Record = pickle.loads((folder / f"{number:06d}.call").read_bytes())
        context = attrs.evolve(record.context, master_port=0)  # peers cannot be met
        if number == 1:
            _succeeded(host.construct(cls, args, kwargs, context, set_env=True), "__init__")
        _restore(record.generators)
        if number < last:
            _succeeded(host.run(record.order, record.call, True), record.order.method)
    arguments = decode(record.call.args), decode(dict(record.call.kwargs))
    method = getattr(host.worker, record.order.method)
    with placed(context, record.call.shard):
        try:
            answer = (
                pdb.Pdb().runcall(method, *arguments[0], **arguments[1])
                if debug
                else method(*arguments[0], **arguments[1])
            )
        except Refused as error:
            raise _alone(error, record.order.method) from error
    kept = folder / f"{last:06d}.answer"
    before = pickle.loads(kept.read_bytes()) if kept.is_file() else None
    return Replayed(
        record.order.method, answer, None if before is None else digests(contents([encode(answer)])) == before
    )


def _succeeded(outcome: Outcome, method: str) -> None:
    if isinstance(outcome, RefusedIt):
        raise _alone(outcome.error, method) from outcome.error
    if isinstance(outcome, Raised):
        raise RuntimeError(f"{method!r}, which ran before, raises {outcome.summary}\n{outcome.traceback}")


def _alone(error: Refused, method: str) -> Refused:
    mend = "replay a method that needs no peers, or an earlier call"
    return Refused(f"{method!r} cannot be replayed by one rank alone: {error.message}", where=error.where, mend=mend)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 the same answer, or none to compare with; 1 another; 2 it cannot be replayed."""
    parser = argparse.ArgumentParser(prog="python -m manymesh.replay", description="Run a rank's recorded call again.")
    parser.add_argument("directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--call", type=int, help="its number, from 1; the last where not given")
    parser.add_argument("--pdb", action="store_true", help="stop at the method's first line")
    options = parser.parse_args(arguments)
    try:
        done = replay(options.directory, options.rank, call=options.call, debug=options.pdb)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    told = {
        True: "the same answer, to the bit",
        False: "ANOTHER ANSWER than the one recorded",
        None: "no answer to compare with",
    }
    print(f"{done.method} on rank {options.rank}: {told[done.equal]}")
    return 1 if done.equal is False else 0


if __name__ == "__main__":
    sys.exit(main())
