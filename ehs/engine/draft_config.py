# SPDX-License-Identifier: Apache-2.0
from typing import Any

from transformers import PreTrainedConfig
from vllm.transformers_utils.configs.extract_hidden_states import ExtractHiddenStatesConfig

from ehs.layers import LayerSelection


class HiddenStatesConfig(ExtractHiddenStatesConfig):
    """Draft configuration whose layer ids are checked against the target model before any weight is loaded.

    `eagle_aux_hidden_state_layer_ids` becomes what vLLM captures (ascending, unique); what was asked for stays in
    `ehs_layers`. With `ehs_speculator="upstream"` nothing is touched, so that upstream's own handling is what runs.
    """

    def __init__(self, model: PreTrainedConfig | dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(model, **kwargs)
        if getattr(self, "ehs_speculator", "ehs") == "upstream":
            return
        if not hasattr(self, "ehs_layers"):
            self.ehs_layers = list(getattr(self, "eagle_aux_hidden_state_layer_ids", None) or [])
        self.eagle_aux_hidden_state_layer_ids = list(self.selection.captured)
        self.architectures = ["EhsHiddenStatesModel"]

    @property
    def selection(self) -> LayerSelection:
        """The layers asked for, resolved for the target model; raises ValueError when they do not exist there."""
        return LayerSelection(tuple(self.ehs_layers), self.get_text_config().num_hidden_layers)
