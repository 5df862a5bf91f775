"""Errors of moving pages.

TransferError            anything below
├── LayoutMismatch       two workers whose pages do not mean the same
├── TransportUnavailable the transport can't start on this machine
└── PeerLost             a peer does not answer any more, or was never known
"""


class TransferError(Exception):
    """Anything that keeps pages from moving."""


class LayoutMismatch(TransferError):
    """Two workers whose pages do not mean the same. Says the field and both values."""


class TransportUnavailable(TransferError):
    """The transport can't start on this machine."""


class PeerLost(TransferError):
    """A peer does not answer any more, or was never known."""
