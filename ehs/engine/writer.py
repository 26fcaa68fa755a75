# SPDX-License-Identifier: Apache-2.0
# Imports no vLLM: the last step between host memory and the file.
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ehs.store import write_error, write_record

logger = logging.getLogger("vllm.ehs.writer")


class Writer:
    """Writes records on threads of its own, so that the engine does not wait for the disk.

    A record that cannot be written becomes an error marker: its reader raises with the reason, the engine serves on.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="ehs-writer")

    def submit(
        self,
        path: Path,
        # [num_tokens, num_layers, hidden_size], on the CPU once `ready` returns
        hidden_states: torch.Tensor,
        # [num_tokens]
        token_ids: torch.Tensor,
        metadata: Mapping[str, str],
        ready: Callable[[], object] = lambda: None,
    ) -> None:
        """Queue one record; `ready` blocks until `hidden_states` hold their values."""
        self._pool.submit(self._write, path, hidden_states, token_ids, metadata, ready)

    def close(self) -> None:
        """Wait until every queued record is written."""
        self._pool.shutdown(wait=True)

    @staticmethod
    def _write(
        path: Path,
        hidden_states: torch.Tensor,
        token_ids: torch.Tensor,
        metadata: Mapping[str, str],
        ready: Callable[[], object],
    ) -> None:
        try:
            ready()
            path.parent.mkdir(parents=True, exist_ok=True)
            write_record(path, hidden_states, token_ids, metadata)
        except Exception as error:
            logger.exception("record %s was not written", path)
            try:
                write_error(path, f"{type(error).__name__}: {error}")
            except OSError:
                logger.exception("no error marker either for %s", path)
