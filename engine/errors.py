"""Errors of the engine.

EngineError                     any error below
├── ModelLoadError              the model folder is missing, incomplete or broken
│   └── UnsupportedModelError   the model computes something the engine has no state or kernel for
└── PagePoolError               a page was released twice, or by someone who does not own the page
"""


class EngineError(Exception):
    """Any error of the engine."""


class ModelLoadError(EngineError):
    """The model folder is missing, incomplete or broken."""


class UnsupportedModelError(ModelLoadError):
    """The model computes something the engine has no state or kernel for."""


class PagePoolError(EngineError):
    """A page was released twice, or by someone who does not own the page. This is a bug of ours, never of a client."""
