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

from core.dispatch import Command, RankCall
from core.errors import Refused, did_you_mean
from core.group import MethodRun, Observer
from core.transport import Answered, Outcome
from core.transport.local import LoneRank, answer_digests, fetched
from core.worker import WorkerContext


@attrs.frozen
class Record:
    """A call as it reached a rank."""

    context: WorkerContext
    command: Command
    call: RankCall
    generators: Mapping[str, Any]


def _absolute(path: str | Path) -> str:
    return str(Path(path).absolute())


@attrs.define
class Recorder(Observer):
    """Observer of a group that stores the calls of some ranks.

    Args:
        directory: where every rank's process can write.
        ranks: whose; None for all.
    """

    directory: str = attrs.field(converter=_absolute)
    ranks: Collection[int] | None = None
    _numbers: dict[int, int] = attrs.field(factory=dict, init=False)

    def before_method(self, run: MethodRun) -> None:
        rank = run.context.rank
        if self.ranks is not None and rank not in self.ranks:
            return
        folder = _folder(self.directory, rank)
        if rank not in self._numbers:
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir():
                old.unlink()
            (folder / "build").write_bytes(cloudpickle.dumps(run.build))
        number = self._numbers[rank] = self._numbers.get(rank, 0) + 1
        record = Record(attrs.evolve(run.context, listener=None), run.command, fetched(run), _generators())
        (folder / f"{number:06d}.call").write_bytes(cloudpickle.dumps(record))

    def after_method(self, run: MethodRun, outcome: Outcome, seconds: float) -> None:
        rank = run.context.rank
        if self.ranks is None or rank in self.ranks:
            collected = isinstance(outcome, Answered) and outcome.value is not None and not run.command.stores
            answer = answer_digests(outcome.value) if collected else None  # type: ignore[union-attr]
            name = f"{self._numbers[rank]:06d}.answer"
            (_folder(self.directory, rank) / name).write_bytes(pickle.dumps(answer))


def _folder(directory: str | Path, rank: int) -> Path:
    return Path(directory) / f"rank-{rank}"


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
        names = [other.name for other in Path(directory).glob("rank-*")]
        raise Refused(f"there is no record of rank {rank}", where=str(directory), mend=did_you_mean(folder.name, names))
    last = numbers[-1] if call is None else call
    if last not in numbers:
        raise Refused(f"there is no call {last}", want=f"1..{numbers[-1]}", where=str(folder))
    build = pickle.loads((folder / "build").read_bytes())
    records: dict[int, Record] = {}
    for number in numbers[: numbers.index(last) + 1]:
        records[number] = pickle.loads((folder / f"{number:06d}.call").read_bytes())
    record, method = records[last], "__init__"
    try:
        rank_alone = LoneRank(build, record.context)
        for number, earlier in records.items():
            method = earlier.command.method
            _restore(earlier.generators)
            if number < last:
                rank_alone.run(earlier.command, earlier.call)
        by = pdb.Pdb().runcall if debug else _call
        answer = rank_alone.invoke(record.command, record.call, by)
    except Refused as error:
        mend = "replay a method that needs no peers, or an earlier call"
        what = f"{method!r} cannot be replayed by one rank alone: {error.message}"
        raise Refused(what, where=error.where, mend=mend) from error
    file = folder / f"{last:06d}.answer"
    before = pickle.loads(file.read_bytes()) if file.is_file() else None
    return Replayed(record.command.method, answer, None if before is None else answer_digests(answer) == before)


def _call(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 the same answer, or none to compare with; 1 another; 2 it cannot be replayed."""
    parser = argparse.ArgumentParser(prog="python -m manymesh.replay", description="Run a rank's recorded call again.")
    parser.add_argument("directory")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--call", type=int, help="its number, from 1; the last where not given")
    parser.add_argument("--pdb", action="store_true", help="stop at the method's first line")
    options = parser.parse_args(arguments)
    try:
        result = replay(options.directory, options.rank, call=options.call, debug=options.pdb)
    except Refused as error:
        print(error, file=sys.stderr)
        return 2
    verdicts = {
        True: "the same answer, to the bit",
        False: "ANOTHER ANSWER than the one recorded",
        None: "no answer to compare with",
    }
    print(f"{result.method} on rank {options.rank}: {verdicts[result.equal]}")
    return 1 if result.equal is False else 0


if __name__ == "__main__":
    sys.exit(main())
