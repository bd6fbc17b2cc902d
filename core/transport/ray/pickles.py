"""Pickling calls for Ray: large arrays and references to objects travel beside the pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from core._calls.call import Command, RankCall
from core.errors import Refused

# Calls below it are sent with the request: Ray's own limit for that is 100 KiB.
INLINE_BYTES = 64 << 10

Pickled = tuple[bytes, list[Any], list[Any]]


class _Pickler(cloudpickle.Pickler):
    """Leaves out Ray's references: these travel beside the pickle, so that Ray counts who holds them."""

    references: list[Any]

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, ray.ObjectRef):
            return None
        self.references.append(value)
        return len(self.references) - 1


class _Unpickler(pickle.Unpickler):
    references: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.references[number]


def pickled(call: tuple[Command, RankCall]) -> Any:
    """A call as (pickle, its arrays, its references), pickled once. A small one travels with the request, a large one
    by the store."""
    buffers: list[PickleBuffer] = []
    data = io.BytesIO()
    pickler = _Pickler(data, protocol=5, buffer_callback=buffers.append)
    pickler.references = []
    pickler.dump(call)
    arrays = [np.asarray(each.raw()) for each in buffers]
    whole = data.getvalue(), arrays, pickler.references
    small = len(whole[0]) + sum(each.nbytes for each in arrays) <= INLINE_BYTES
    return whole if small else ray.put(whole)


def unpickled(parcel: Pickled) -> Any:
    data, arrays, references = parcel
    unpickler = _Unpickler(io.BytesIO(data), buffers=arrays)
    unpickler.references = references
    return unpickler.load()


def checked(method: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Refused:
        raise
    except Exception as error:  # pickling runs any object's own code
        raise Refused(
            f"the arguments of {method!r} cannot be sent to the workers",
            have=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            want="values that can be pickled",
        ) from error
