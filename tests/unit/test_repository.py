# SPDX-License-Identifier: Apache-2.0
import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("ehs/**/*.py"), *ROOT.glob("tests/**/*.py"), ROOT / "noxfile.py", ROOT / "conftest.py"])
MAY_IMPORT_VLLM = ("ehs/engine/", "ehs/models/", "ehs/compat.py", "ehs/plugin.py")


def test_every_source_file_is_looked_at() -> None:
    names = {str(path.relative_to(ROOT)) for path in SOURCES}
    assert {"ehs/store.py", "ehs/verify/run.py", "tests/unit/conftest.py", "noxfile.py", "conftest.py"} <= names
    assert len(SOURCES) > 50


def test_every_source_file_starts_with_its_license() -> None:
    without = [path for path in SOURCES if not path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")]
    assert without == []


def test_sources_are_plain_ascii() -> None:
    assert [path for path in SOURCES if not path.read_bytes().isascii()] == []


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.Call) and "import" in ast.unparse(node.func):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@pytest.mark.parametrize(
    "source",
    ["import vllm", "from vllm.config import X", "import os, vllm.x as y", "importlib.import_module('vllm.x')"],
)
def test_an_import_of_vllm_is_seen_in_every_form(source: str) -> None:
    assert any(name.split(".")[0] == "vllm" for name in imports(ast.parse(source)))


def test_only_the_engine_side_imports_vllm() -> None:
    importing = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("ehs/**/*.py")
        if any(name.split(".")[0] == "vllm" for name in imports(ast.parse(path.read_text())))
    }
    assert {name for name in importing if not name.startswith(MAY_IMPORT_VLLM)} == set()
    # The files that are known to do so are seen: the check above looks at something.
    assert {"ehs/plugin.py", "ehs/engine/connector.py"} <= importing


# The parent of engine processes and the readers of records run where vLLM is not installed.
_WITHOUT_VLLM = """
import sys

class Blocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] == "vllm":
            raise ImportError("vllm is blocked in this test")

sys.meta_path.insert(0, Blocked)
import ehs
assert "torch" not in sys.modules, "import ehs should be cheap"
assert set(ehs.__all__) <= set(dir(ehs))
import ehs.config, ehs.store, ehs.layers, ehs.verify.run, ehs.cli, ehs.doctor, ehs.engine.writer
assert all(getattr(ehs, name).__name__ == name for name in ehs.__all__)
assert "vllm" not in sys.modules
# Too early, and the CPU backend could no longer be chosen.
assert "triton" not in sys.modules
"""


def test_everything_but_the_engine_works_without_vllm() -> None:
    command = [sys.executable, "-W", "error", "-c", _WITHOUT_VLLM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
