"""Errors that a worker process ends with in one line, without a traceback."""

from engine.errors import ModelLoadError
from kv_transfer.errors import TransferError
from rpc.config import ConfigError
from rpc.server import PortInUse

EXPECTED_ERRORS = (ModelLoadError, TransferError, PortInUse, ConfigError)
