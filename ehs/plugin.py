# SPDX-License-Identifier: Apache-2.0
# vLLM calls `register` in every process, possibly more than once; a second call must find nothing to do.
import logging
from typing import Any

logger = logging.getLogger("vllm.plugins.ehs")

# Class of the speculator that was built in this process; records carry it.
_live: list[str] = []

MODEL_ARCHITECTURES = {
    "EhsHiddenStatesModel": "ehs.engine.draft_model:EhsHiddenStatesModel",
    "EhsPredictableForCausalLM": "ehs.models.predictable:PredictableForCausalLM",
}


def register() -> None:
    """Install the speculator, the draft configuration, the draft model and the predictable model.

    Raises:
        UnsupportedVllmError: this vLLM is not one this code knows. vLLM logs that and goes on without the plugin, so a
            run must prove which class is live (records name it in their metadata).
    """
    from ehs.compat import check_speculator, check_vllm

    check_vllm()
    from vllm import ModelRegistry
    from vllm.transformers_utils.configs import extract_hidden_states as config_module

    from ehs.engine.draft_config import HiddenStatesConfig

    known = ModelRegistry.get_supported_archs()
    for architecture, location in MODEL_ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, location)
    # Both modules are imported by vLLM at the moment of use, so replacing one attribute in each is enough.
    config_module.ExtractHiddenStatesConfig = HiddenStatesConfig
    from vllm.v1.worker.gpu.spec_decode import extract_hidden_states as speculator_module

    if not hasattr(speculator_module, "upstream_speculator"):
        check_speculator(speculator_module.ExtractHiddenStatesSpeculator.propose)
        speculator_module.upstream_speculator = speculator_module.ExtractHiddenStatesSpeculator
        speculator_module.ExtractHiddenStatesSpeculator = make_speculator


def make_speculator(vllm_config: Any, device: Any) -> Any:
    """Build the speculator that the engine configuration names, and log which class that is."""
    from vllm.v1.worker.gpu.spec_decode import extract_hidden_states as speculator_module

    from ehs.engine.speculator import ExtractHiddenStatesSpeculator

    classes = {"ehs": ExtractHiddenStatesSpeculator, "upstream": speculator_module.upstream_speculator}
    hf_config = vllm_config.speculative_config.draft_model_config.hf_config
    speculator = classes[getattr(hf_config, "ehs_speculator", "ehs")](vllm_config, device)
    _live[:] = [f"{type(speculator).__module__}.{type(speculator).__qualname__}"]
    logger.info("hidden states are extracted by %s", _live[0])
    return speculator


def live_speculator() -> str | None:
    """Qualified class name of the speculator built last in this process, None when there is none."""
    return _live[0] if _live else None
