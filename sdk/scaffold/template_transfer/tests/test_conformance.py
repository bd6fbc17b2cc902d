"""Whether this is a transfer as manymesh means it. `pytest` runs all of it; the score is printed at the end."""

from __future__ import annotations

from sdk.conformance import TransferConformance


class TestTemplateTransfer(TransferConformance):
    backend = "template-transfer"
