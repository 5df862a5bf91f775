"""Errors of KV transfer.

TransferError            any error below
├── LayoutMismatch       two workers whose pages have different contents or layouts
├── TransportUnavailable the transport can't start on this machine
└── PeerLost             a peer does not respond any more, or was never connected
"""


class TransferError(Exception):
    """Any error of KV transfer."""


class LayoutMismatch(TransferError):
    """Two workers whose pages have different contents or layouts. The message names each field with both values."""


class TransportUnavailable(TransferError):
    """The transport can't start on this machine."""


class PeerLost(TransferError):
    """A peer does not respond any more, or was never connected."""
