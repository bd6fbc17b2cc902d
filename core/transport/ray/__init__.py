"""Groups of Ray actors: pools and placement, order of ranks, and the transport."""

from core.transport.ray.group import RayWorkerGroup
from core.transport.ray.pool import RayResourcePool, ResourcePoolManager

__all__ = ["RayResourcePool", "RayWorkerGroup", "ResourcePoolManager"]
