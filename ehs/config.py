# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from ehs.layers import check_layer_ids

Speculator = Literal["ehs", "upstream"]
DraftPolicy = Literal["none", "repeat"]

CONNECTOR = "EhsConnector"
CONNECTOR_MODULE = "ehs.engine.connector"
_OWN_POLICY: dict[Speculator, DraftPolicy] = {"ehs": "none", "upstream": "repeat"}
# Largest batch the zero-draft schedule must cover; vLLM wants a closed range and any batch is smaller than this.
_ANY_BATCH_SIZE = 1 << 20


def usable_folder(setting: str, folder: Path) -> Path:
    """The folder as an absolute path; it may not exist yet.

    Raises:
        ValueError: it, or the nearest parent that exists, is not a folder this process may write to.
    """
    folder = folder.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{setting}={str(folder)!r}: {existing} is not a folder this process may write to")
    return folder


class ExtractionConfig(BaseModel):
    """What to extract and where to put it; becomes vLLM engine arguments.

    Attributes:
        layers: layer ids in the order wanted, duplicates allowed, negative ids count from the end (-1 is the stream
            after the last layer, before the final norm).
        storage_path: folder for the records, created when missing.
        speculator: whose speculator runs in the engine: this project's or vLLM's own.
        draft_policy: "none" plans no draft tokens, so decode schedules exactly what a plain engine does; "repeat" has
            every step verify the last token repeated, as upstream does. Default: "none", for upstream "repeat".
        writer_threads: threads that write files, per engine.

    Raises:
        ValueError: any value is out of its range, or a key is unknown (pydantic's ValidationError is one).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: Annotated[tuple[int, ...], BeforeValidator(check_layer_ids)]
    storage_path: Path
    speculator: Speculator = "ehs"
    draft_policy: DraftPolicy | None = None
    writer_threads: Annotated[int, Field(ge=1, le=64)] = 4

    @field_validator("storage_path")
    @classmethod
    def _usable_folder(cls, path: Path) -> Path:
        return usable_folder("storage_path", path)

    def engine_args(self) -> dict[str, Any]:
        """Keyword arguments for `vllm.LLM` or `vllm.AsyncEngineArgs`, without the model."""
        hf_config: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
        hf_config["ehs_speculator"] = self.speculator
        speculative_config: dict[str, Any] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        }
        if (self.draft_policy or _OWN_POLICY[self.speculator]) == "none":
            speculative_config["num_speculative_tokens_per_batch_size"] = [(1, _ANY_BATCH_SIZE, 0)]
        return {
            "speculative_config": speculative_config,
            "kv_transfer_config": {
                "kv_connector": CONNECTOR,
                "kv_connector_module_path": CONNECTOR_MODULE,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {
                    "shared_storage_path": str(self.storage_path),
                    "writer_threads": self.writer_threads,
                },
            },
        }
