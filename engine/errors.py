"""Errors of the engine.

EngineError                     anything below
├── ModelLoadError              the model folder is missing, incomplete or broken
│   └── UnsupportedModelError   the model computes something the engine has no state or kernel for
└── PagePoolError               a page was given back twice, or by someone who does not own it
"""


class EngineError(Exception):
    """Anything the engine refuses to do."""


class ModelLoadError(EngineError):
    """The model folder is missing, incomplete or broken."""


class UnsupportedModelError(ModelLoadError):
    """The model computes something the engine has no state or kernel for."""


class PagePoolError(EngineError):
    """A page was given back twice, or by someone who does not own it: a defect of ours, never of a client."""
