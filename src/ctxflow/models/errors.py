"""The errors of this room, apart from the libraries they are about, so that a driver can tell them apart."""

from __future__ import annotations

from ctxflow.errors import CtxflowError


class ModelNotFoundError(CtxflowError, LookupError):
    """No model is reachable under the name that was given; the message says what to do."""


class MissingPackageError(CtxflowError, ImportError):
    """A library that a model needs is not installed; the message says how to install it.

    >>> print(MissingPackageError.about("torch", extra="transformers"))
    torch must be installed where this context is built: pip install 'ctxflow[transformers]'
    """

    @classmethod
    def about(cls, packages: str, *, extra: str) -> MissingPackageError:
        """The error for packages that an extra of ctxflow brings."""
        return cls(f"{packages} must be installed where this context is built: pip install 'ctxflow[{extra}]'")


class OutOfMemoryError(CtxflowError, MemoryError):
    """One row alone does not fit in the device's memory."""
