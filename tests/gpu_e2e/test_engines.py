# SPDX-License-Identifier: Apache-2.0
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ehs.models.checkpoints import find_checkpoint
from ehs.store import inspect_path

README = (Path(__file__).parents[2] / "README.md").read_text()


def snippet(*, multiprocessing: bool) -> str:
    """The README's script with the model replaced by one that is here, and its prelude for machines without a GPU.

    In a process of its own the engine compiles the model, as vLLM does by default; in this one it runs it eagerly.
    """
    script: str
    prelude: str
    script, prelude = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert '"Qwen/Qwen3-8B"' in script
    script = script.replace('"Qwen/Qwen3-8B"', f"{find_checkpoint('tiny-llama')!r}").replace(
        "[2, 15, -1]", "[2, 5, -1]"
    )
    if not multiprocessing:
        script = script.replace("**config", "enforce_eager=True, **config")
    return (prelude + script).replace("multiprocessing=True", f"multiprocessing={multiprocessing}")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("multiprocessing", [True, False], ids=["engine-process", "in-process"])
def test_the_readme_snippet_reads_a_complete_record(tmp_path: Path, *, multiprocessing: bool) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(snippet(multiprocessing=multiprocessing))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch.Size([19]) torch.Size([19, 3, 128]) (2, 5, 6)" in done.stdout
    (inspected,) = inspect_path(tmp_path / "out")
    assert inspected.problem is None
    assert inspected.summary["speculator"] == "ehs.engine.speculator.ExtractHiddenStatesSpeculator"
    assert inspected.summary["runner"] == "v2"
