"""The suite of weight transfers."""

from __future__ import annotations

from sdk.conformance.suites.manifest import ManifestSuite
from sdk.conformance.suites.transfer import TransferSuite


class TransferConformance(ManifestSuite, TransferSuite):
    """Whether a backend meets core.transfer.WeightTransfer. See Conformance for what a subclass sets; `worlds` has no
    meaning here."""
