"""The errors of this room, apart from the libraries they are about, so that a driver can tell them apart."""

from __future__ import annotations

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install


class ModelNotFoundError(CtxflowError, LookupError):
    """No model is reachable under the name that was given; the message says what to do."""


class MissingPackageError(CtxflowError, ImportError):
    """A library that a model needs is not installed; the message says how to install it.

    >>> print(str(MissingPackageError.about("torch", extra="transformers")).partition(":")[0])
    torch must be installed where this context is built
    """

    @classmethod
    def about(cls, *packages: str, extra: str, why: ImportError | None = None) -> MissingPackageError:
        """Return the error for packages that an extra of ctxflow brings.

        :param why: what the import said.
        """
        said = f" ({why})" if why else ""
        return cls(
            f"{' and '.join(packages)}{said} must be installed where this context is built: "
            f"{how_to_install(*packages, extra=extra)}"
        )


class OutOfMemoryError(CtxflowError, MemoryError):
    """One row alone does not fit in the device's memory."""
