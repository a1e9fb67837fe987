# SPDX-License-Identifier: Apache-2.0
"""What SGLang's KV pools ask before they show a layer: has it landed for the batch that runs?"""

from __future__ import annotations

import itertools
from typing import Protocol

__all__ = ["LayerCounter", "LayerSource"]


class LayerSource(Protocol):
    """Loads of one batch."""

    def wait_layer(self, layer: int) -> None:
        """What follows (on CUDA: on the current stream) sees the layer's bytes."""


class LayerCounter:
    """The counter that SGLang registers with its pools (`register_layer_transfer_counter`).

    A layer that could not be loaded raises nothing here: the forward runs on whatever its pages hold, and the batch's
    end says so.

    Attributes:
        num_layers: of the pools.
        consumer_index: of the batch that runs; -1: one without loads.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._indexes = itertools.count()
        self._sources: dict[int, LayerSource] = {}

    def add(self, source: LayerSource) -> int:
        """Under way from now on; returns its index, which no other batch ever has."""
        index = next(self._indexes)
        self._sources[index] = source
        return index

    def remove(self, index: int) -> None:
        """Its loads have ended; waits for it return at once."""
        self._sources.pop(index, None)

    def set_consumer(self, index: int) -> None:
        """The batch that waits next; -1: none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Of the running batch: what follows sees the layer's bytes.

        On CUDA the current stream waits and the host does not; on CPU tensors the calling thread does, without the GIL.
        """
        source = self._sources.get(self.consumer_index)
        if source is not None:
            source.wait_layer(layer)
