"""What carries calls to workers: Ray (`core.transport.ray`), or the driver's own process (`core.transport.local`)."""

from core._run.transport import Answered, BadlyAnswered, Died, Identity, Outcome, Raised, RefusedIt, Ticket, Transport

__all__ = ["Answered", "BadlyAnswered", "Died", "Identity", "Outcome", "Raised", "RefusedIt", "Ticket", "Transport"]
