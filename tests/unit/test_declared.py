# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DECLARED = '[suite]\n"test_a.py" = 2\n"test_b.py" = 1\n'
TESTS = {
    "test_a.py": "import pytest\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test(n):\n    assert n\n",
    "test_b.py": "def test():\n    pass\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "tests" / "suite").mkdir(parents=True)
    (tmp_path / "tests" / "declared.toml").write_text(DECLARED)
    for name, text in TESTS.items():
        (tmp_path / "tests" / "suite" / name).write_text(text)
    return tmp_path


def run(tree: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--declared", "suite", "tests/suite"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


def test_a_whole_suite_passes_and_says_how_many_ran(tree: Path) -> None:
    done = run(tree)
    assert done.returncode == 0, done.stdout
    assert (tree / "reports" / "suite.ran").read_text() == "suite: 3 tests passed, all that are declared\n"


def test_a_deleted_file_fails(tree: Path) -> None:
    (tree / "tests" / "suite" / "test_b.py").unlink()
    done = run(tree)
    assert done.returncode == 1
    assert "suite/test_b.py: 0 of 1 declared tests passed" in done.stdout


def test_a_deleted_case_fails(tree: Path) -> None:
    test = tree / "tests" / "suite" / "test_a.py"
    test.write_text(test.read_text().replace("[1, 2]", "[1]"))
    assert run(tree).returncode == 1


def test_a_skip_does_not_count(tree: Path) -> None:
    test = tree / "tests" / "suite" / "test_b.py"
    test.write_text("import pytest\n\ndef test():\n    pytest.skip('no reason')\n")
    assert run(tree).returncode == 1
