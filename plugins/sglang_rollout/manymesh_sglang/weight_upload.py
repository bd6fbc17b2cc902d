"""The three ways by which weights reach a server. Each sends one update: begin, buckets, end or abort.

Whatever a server answers, no wait is without a deadline, and a sender is never left in a collective that its server has
refused.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed import distributed_c10d

from core.errors import DeadlineExceeded, ManymeshError
from manymesh.parts.base_rollout import Bucket
from manymesh_sglang.flattened_bucket import dtype_name, flatten
from manymesh_sglang.http import HttpClient, ServerError, parsed

T = TypeVar("T")
LEAVE_S = 10.0  # for a server that may be dead


class WeightUpload(Protocol):
    """
    Attributes:
        is_staged: the weights before it are whole until `end`.
    """

    is_staged: bool

    async def begin(self) -> None: ...
    async def load(self, bucket: Bucket) -> None: ...
    async def end(self) -> None: ...
    async def abort(self) -> None: ...
    async def close(self) -> None: ...


async def post_checked(client: HttpClient, path: str, body: Any, timeout_s: float) -> None:
    """Ask for what a server answers with `success`. Raises ManymeshError where that is not so."""
    try:
        answer = await client.call("POST", path, body, timeout_s=timeout_s)
    except ServerError as error:
        answer = parsed(error.body)  # SGLang has success: false with status 200 or 400
        if not isinstance(answer, dict) or "success" not in answer:
            raise
    if not isinstance(answer, dict) or answer.get("success") is not True:
        raise ManymeshError(
            "SGLang did not take the weights",
            have=answer.get("message", answer) if isinstance(answer, dict) else answer,
            where=f"{path} of {client.address}",
            mend="send all weights again, in a new update",
        )


class _Session:
    """Between begin_weight_update and end_weight_update a server takes tensors, and at no other time."""

    is_staged = False

    def __init__(self, client: HttpClient, timeout_s: float) -> None:
        self._client, self._timeout_s = client, timeout_s

    async def begin(self) -> None:
        await self._post("/begin_weight_update", {"selector": "all"})

    async def end(self) -> None:
        await self._post("/end_weight_update", {})

    async def abort(self) -> None:
        with suppress(ManymeshError):
            await self.end()

    async def _post(self, path: str, body: Any) -> None:
        await post_checked(self._client, path, body, self._timeout_s)

    async def close(self) -> None:
        pass


class DistributedUpload(_Session):
    """Broadcasts of a group of this process and the server's, of which each has the whole of a bucket.

    Args:
        num_receivers: processes of the server that hold the model together.
        host: by which the server reaches this process.
        backend: "gloo" or "nccl".
    """

    def __init__(
        self,
        client: HttpClient,
        timeout_s: float,
        *,
        num_receivers: int = 1,
        host: str,
        backend: str,
        device: torch.device,
    ) -> None:
        super().__init__(client, timeout_s)
        self._world_size = 1 + num_receivers
        self._host, self._backend, self._device = host, backend, device
        self._group: Any = None
        self._name = ""

    async def begin(self) -> None:
        if self._group is None:
            await self._meet()
        await super().begin()

    async def _meet(self) -> None:
        """All open the group at once: each waits for the others, and no longer than the deadline."""
        self._name = f"manymesh-{secrets.token_hex(8)}"
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            self._host,
            port,
            self._world_size,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
        ours = _in_thread(lambda: self._open(store, timeout))
        body = {
            "master_address": self._host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._world_size,
            "group_name": self._name,
            "backend": self._backend,
        }
        asking = asyncio.ensure_future(self._post("/init_weights_update_group", body))
        try:
            await asyncio.wait({ours, asking}, timeout=self._timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if asking.done():
                asking.result()
            if not (ours.done() and asking.done()):
                raise DeadlineExceeded(
                    f"no group with the server within {self._timeout_s:g} s", where=self._client.address
                )
            self._group = ours.result()
        except RuntimeError as error:
            raise ManymeshError("no group with the server", have=str(error), where=self._client.address) from error
        finally:
            asking.cancel()

    def _open(self, store: Any, timeout: timedelta) -> Any:
        """As SGLang does on its side, so that the keys in the store are the same."""
        prefixed, name = dist.PrefixStore(self._name, store), cast(Any, self._name)
        group, _ = distributed_c10d._new_process_group_helper(
            self._world_size, 0, [], distributed_c10d.Backend(self._backend), prefixed, group_name=name, timeout=timeout
        )
        distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(self._world_size)}
        return group

    async def load(self, bucket: Bucket) -> None:
        ordered, flat = flatten(bucket)
        body = {
            "names": [name for name, _ in ordered],
            "dtypes": [dtype_name(tensor) for _, tensor in ordered],
            "shapes": [list(tensor.shape) for _, tensor in ordered],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        options = dist.BroadcastOptions()
        options.rootRank, options.asyncOp = 0, True
        sending = self._group.broadcast([flat.to(self._device)], options)
        try:
            await self._post("/update_weights_from_distributed", body)
            # It has them, so that this is only to see that our side is done too.
            await _in_thread(lambda: sending.wait(timedelta(seconds=self._timeout_s)))
        except BaseException as error:
            await self._leave(sending)  # a broadcast that nobody took: the group is of no more use
            if isinstance(error, RuntimeError):
                raise ManymeshError("the broadcast of weights failed", have=str(error)) from error
            raise

    async def close(self) -> None:
        await self._leave(None)

    async def _leave(self, sending: Any) -> None:
        """Let go of the group. What is under way in it ends as the server lets go of it too, or by its deadline, in a
        thread of its own: torch would wait for it in the group's destructor, with the interpreter locked."""
        group, self._group = self._group, None
        if group is None:
            return
        timeout = timedelta(seconds=self._timeout_s)
        threading.Thread(target=_destroy, args=(group, sending, timeout), name="end weights group", daemon=True).start()
        del group
        with suppress(ManymeshError):
            body = {"group_name": self._name}
            await post_checked(self._client, "/destroy_weights_update_group", body, min(LEAVE_S, self._timeout_s))


def _in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Its value. The thread is a daemon: one that waits for a peer must not keep the process from its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, value))

    def run() -> None:
        try:
            value, error = function(), None
        except BaseException as raised:
            value, error = None, raised
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, name="weights group", daemon=True).start()
    return future


def _destroy(group: Any, sending: Any, timeout: timedelta) -> None:
    if sending is not None:
        with suppress(Exception):
            sending.wait(timeout)
    with suppress(Exception):
        dist.destroy_process_group(group)


class TensorUpload(_Session):
    """Handles to memory of this host, or of its GPU.

    Args:
        num_receivers: processes of the server that hold the model together.
    """

    def __init__(self, client: HttpClient, timeout_s: float, num_receivers: int = 1) -> None:
        super().__init__(client, timeout_s)
        self._num_receivers = num_receivers

    async def load(self, bucket: Bucket) -> None:
        from manymesh_sglang.local_engine import serialized

        # The server is no child of multiprocessing's, so that no file descriptors can be passed.
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            data = [base64.b64encode(each).decode() for each in serialized(bucket, self._num_receivers)]
            body = {"serialized_named_tensors": data, "load_format": "flattened_bucket", "flush_cache": False}
            await self._post("/update_weights_from_tensor", body)
        finally:
            torch.multiprocessing.set_sharing_strategy(before)


class DiskUpload:
    """A checkpoint without a config, which the server loads as a whole."""

    is_staged = True

    def __init__(self, client: HttpClient, timeout_s: float, directory: str | None) -> None:
        self._client, self._timeout_s, self._within = client, timeout_s, directory
        self._directory: Path | None = None
        self._num_files = 0

    async def begin(self) -> None:
        self._remove()
        self._directory = Path(tempfile.mkdtemp(prefix="manymesh-weights-", dir=self._within))
        self._num_files = 0

    async def load(self, bucket: Bucket) -> None:
        assert self._directory is not None
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in bucket}
        await asyncio.to_thread(save_file, tensors, self._directory / f"bucket-{self._num_files:05}.safetensors")
        self._num_files += 1

    async def end(self) -> None:
        body = {"model_path": str(self._directory), "load_format": "safetensors", "flush_cache": False}
        try:
            await post_checked(self._client, "/update_weights_from_disk", body, self._timeout_s)
        finally:
            self._remove()

    async def abort(self) -> None:
        self._remove()

    def _remove(self) -> None:
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    async def close(self) -> None:
        self._remove()
