"""Options of the kinds of transfer. Imports nothing heavy."""

from __future__ import annotations

import os

import attrs

from core.errors import ConfigError


@attrs.frozen
class CollectiveConfig:
    """A broadcast over a process group of its own: NCCL where all ends are on CUDA, else gloo."""


@attrs.frozen
class IpcConfig:
    """Through memory that the ends share: they are on one node."""


@attrs.frozen
class ObjectStoreConfig:
    """Through Ray's object store: for ends that no collective connects."""


@attrs.frozen
class DiskConfig:
    """Through files.

    Attributes:
        directory: an absolute path that the sender can write and all receivers can read. It holds files only during a
            sync.
    """

    directory: str

    def __attrs_post_init__(self) -> None:
        if not os.path.isabs(os.path.expanduser(self.directory)):
            raise ConfigError(
                "the directory of a transfer is an absolute path, since workers run elsewhere", have=self.directory
            )
