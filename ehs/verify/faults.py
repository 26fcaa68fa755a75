# SPDX-License-Identifier: Apache-2.0
# Mechanisms of real bugs, put back on purpose inside the engine process. The harness must name the place of each.
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """One injected bug.

    Attributes:
        name: as on the command line.
        summary: what goes wrong, one line.
        site: where the bug is put.
        reference: a public bug with this mechanism.
        inject: patches the engine code of this process; call before the engine is built.
    """

    name: str
    summary: str
    site: str
    reference: str
    inject: Callable[[], None]


def _patch(owner: object, name: str, replacement: object) -> None:
    """Put a replacement where it is looked up; a name that is not there is a fault of the fault."""
    assert hasattr(owner, name)
    setattr(owner, name, replacement)


def _swap_token_rows() -> None:
    import torch

    from ehs.engine import draft_model
    from ehs.engine.cache_write import write_hidden_states

    def swapping(aux: Sequence[torch.Tensor], cache: torch.Tensor, slots: torch.Tensor, sources: Sequence[int]) -> None:
        # The first two tokens of a step that has two land in each other's slot.
        if len(slots) > 1:
            slots = torch.cat([slots[:2].flip(0), slots[2:]])
        write_hidden_states(aux, cache, slots, sources)

    _patch(draft_model, "write_hidden_states", swapping)


def _swap_requests() -> None:
    from ehs.engine.connector import EhsConnector

    finished = EhsConnector.request_finished
    previous: list[list[int]] = []

    def swapping(self: Any, request: Any, block_ids: list[int]) -> Any:
        # A request that needs no more blocks than the one that finished before it gets that one's blocks.
        mine, other = list(block_ids), previous[-1] if previous else None
        previous[:] = [mine]
        return finished(self, request, other if other and len(other) >= len(mine) else mine)

    _patch(EhsConnector, "request_finished", swapping)


def _shift_layer_ids() -> None:
    from ehs.engine import draft_config
    from ehs.layers import LayerSelection

    class Shifted(LayerSelection):
        @property
        def captured(self) -> tuple[int, ...]:
            # One layer too early, as when 0-based layer indices are taken for layer ids.
            return tuple(sorted({max(layer - 1, 0) for layer in self.layer_ids}))

        @property
        def sources(self) -> tuple[int, ...]:
            return tuple(self.captured.index(max(layer - 1, 0)) for layer in self.layer_ids)

    _patch(draft_config, "LayerSelection", Shifted)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "swap-token-rows",
            "the first two tokens of each step are written into each other's cache slot",
            "cache write",
            "https://github.com/vllm-project/speculators/issues/279",
            _swap_token_rows,
        ),
        Fault(
            "swap-requests",
            "a finished request is read from the blocks of the one that finished before it",
            "connector, scheduler half",
            "https://github.com/sgl-project/sglang/issues/26163",
            _swap_requests,
        ),
        Fault(
            "shift-layer-ids",
            "every layer is captured one too early",
            "layer selection",
            "https://github.com/lightseekorg/TorchSpec/issues/87",
            _shift_layer_ids,
        ),
    )
}
