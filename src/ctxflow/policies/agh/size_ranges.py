"""Configurations that differ only in their number of GPUs, as those of a site's workers do: a range of sizes."""

from __future__ import annotations

import dataclasses

import numpy as np

from ctxflow.policies.agh.problem import Bools, Constants, Floats, Ints


@dataclasses.dataclass(frozen=True)
class SizeRanges:
    """Pairs of model and tier, each with configurations that delay every query type alike and have consecutive sizes.

    Nearly always it is one configuration.

    :ivar smallest: (G, 3) model, tier and smallest configuration. :ivar span: (G,) GPUs that it may have more.
    :ivar spare_gb: (G,) what each GPU more adds to the memory for KV caches.
    """

    smallest: Ints
    span: Ints
    spare_gb: Floats

    @classmethod
    def of(cls, arrays: Constants, options: Bools) -> SizeRanges:
        """Return the ranges that some configurations (J, K, C) make up.

        >>> from ctxflow.policies.agh.problem import Arrays, paper_instance
        >>> arrays = Arrays.of(paper_instance())
        >>> ranges = SizeRanges.of(arrays, arrays.options())
        >>> bool((ranges.span == 0).all())
        True
        """
        found: list[tuple[int, int, int]] = []
        span: list[int] = []
        for j, k in np.argwhere(options.any(axis=2)).tolist():
            last: dict[bytes, int] = {}  # The range that ends with this delay.
            for c in np.flatnonzero(options[j, k]).tolist():
                delay = arrays.delay[:, j, k, c].tobytes()
                place = last.get(delay)
                if place is not None and arrays.gpus[c] == arrays.gpus[found[place][2]] + span[place] + 1:
                    span[place] += 1
                    continue
                last[delay] = len(found)
                found.append((j, k, c))
                span.append(0)
        smallest = np.array(found, dtype=np.int64).reshape(-1, 3)
        ranges = cls(smallest, np.array(span, dtype=np.int64), np.zeros(len(found)))
        for n in np.flatnonzero(ranges.span):
            j, k, c = found[n]
            top = ranges.configuration(arrays, int(n), span[n])
            ranges.spare_gb[n] = (arrays.spare_gb[j, k, top] - arrays.spare_gb[j, k, c]) / span[n]
        return ranges

    def configuration(self, arrays: Constants, n: int, more: int) -> int:
        """Return the configuration of a range that has so many GPUs more than its smallest."""
        j, k, c = (int(each) for each in self.smallest[n])
        if not more:
            return c
        alike = (arrays.delay[:, j, k, c, None] == arrays.delay[:, j, k]).all(axis=0) & arrays.fits[j, k]
        return int(np.flatnonzero(alike & (arrays.gpus == arrays.gpus[c] + more))[0])
