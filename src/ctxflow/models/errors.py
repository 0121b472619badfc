"""The errors of this room, apart from the libraries they are about, so that a driver can tell them apart."""

from __future__ import annotations

from typing import Any

from ctxflow.errors import CtxflowError
from ctxflow.installing import how_to_install


class ModelNotFoundError(CtxflowError, LookupError):
    """No model is reachable under the name that was given; the message says what to do."""


class WrongModelError(CtxflowError, ValueError):
    """A model cannot do what it is to do; the message says what it is, and what it can do."""


class InputTooLong(CtxflowError, ValueError):
    """An input has more tokens than fit, and was not to be cut.

    :ivar what: the input, for messages.
    :ivar tokens: how many it has; `limit`, how many fit; `why`, what sets the limit.

    >>> print(str(InputTooLong("the prompt", 600, 256, "the model reads 256 at most")).partition(":")[0])
    the prompt has 600 tokens, but 256 fit (the model reads 256 at most)
    """

    def __init__(self, what: str, tokens: int, limit: int, why: str) -> None:
        self.what, self.tokens, self.limit, self.why = what, tokens, limit, why
        has = f"{what} has {tokens} token{'' if tokens == 1 else 's'}"
        if limit > 0:
            remedy = 'shorten it, or have it cut, with too_long="cut-start" or "cut-end" (ctxflow batch: --too-long)'
            super().__init__(f"{has}, but {limit} fit ({why}): {remedy}")
        else:
            super().__init__(f"{has}, but there is no room for any ({why}): give less")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.tokens, self.limit, self.why)

    def named(self, what: str) -> InputTooLong:
        """The same error about an input of another name."""
        return type(self)(what, self.tokens, self.limit, self.why)


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
