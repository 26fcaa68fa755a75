# SPDX-License-Identifier: Apache-2.0
from collections.abc import Sequence
from dataclasses import dataclass


def check_layer_ids(layers: Sequence[object]) -> tuple[int, ...]:
    """Check what can be checked without knowing the model.

    Args:
        layers: layer ids as asked for, any order, duplicates allowed, negative ids count from the end.

    Returns:
        The same ids as a tuple of int.

    Raises:
        ValueError: `layers` is empty or holds something that is not an int (bool and float are refused).
    """
    if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
        raise ValueError(f"layers={layers!r}: a list of integers is needed, for example [2, 15, -1]")
    if not layers:
        raise ValueError(f"layers={list(layers)}: at least one layer id is needed")
    for layer in layers:
        if type(layer) is not int:
            raise ValueError(f"layers={list(layers)}: {layer!r} is not an integer layer id")
    return tuple(layer for layer in layers if isinstance(layer, int))


@dataclass(frozen=True)
class LayerSelection:
    """What was asked, what vLLM captures, and how one maps to the other.

    Layer ids are vLLM's: 0 is the embedding output, k the residual stream after decoder layer k-1, `num_hidden_layers`
    the stream after the last layer, before the final norm. -1 means `num_hidden_layers`.

    Attributes:
        asked: ids as the user wrote them.
        num_hidden_layers: decoder layers of the target model.

    Raises:
        ValueError: an id is not an integer or lies outside `[-(N + 1), N]`.
    """

    asked: tuple[int, ...]
    num_hidden_layers: int

    def __post_init__(self) -> None:
        num_ids = self.num_hidden_layers + 1
        for layer in check_layer_ids(self.asked):
            if not -num_ids <= layer < num_ids:
                raise ValueError(
                    f"layers={list(self.asked)}: layer id {layer} is out of range, this model has ids 0 to "
                    f"{self.num_hidden_layers} (or {-num_ids} to -1, counted from the end)"
                )

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Ids asked for with negative ones resolved; `hidden_states[:, i]` is layer `layer_ids[i]`."""
        return tuple(layer % (self.num_hidden_layers + 1) for layer in self.asked)

    @property
    def captured(self) -> tuple[int, ...]:
        """What vLLM is asked to capture: ascending and unique, the one order every model class keeps."""
        return tuple(sorted(set(self.layer_ids)))

    @property
    def sources(self) -> tuple[int, ...]:
        """Per id asked for, its index in `captured`: column i of a record comes from captured tensor `sources[i]`."""
        return tuple(self.captured.index(layer) for layer in self.layer_ids)
