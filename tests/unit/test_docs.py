# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from ehs.store import METADATA_KEYS
from ehs.verify.faults import FAULTS
from ehs.verify.limits import render_markdown
from ehs.verify.scenarios import SCENARIOS

ROOT = Path(__file__).parents[2]


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_limits_page_shows_the_table() -> None:
    assert render_markdown() in read("docs/limits.md")


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_documented(name: str) -> None:
    assert f"| `{name}` |" in read("docs/scenarios.md")


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_documented_with_its_public_bug(name: str) -> None:
    (row,) = [line for line in read("docs/faults.md").splitlines() if line.startswith(f"| `{name}` |")]
    assert FAULTS[name].reference in row


def test_every_metadata_key_is_documented() -> None:
    page = read("docs/file_format.md")
    assert [key for key in METADATA_KEYS if f"`{key}`" not in page] == []


def test_pages_link_to_pages_that_exist() -> None:
    import re

    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        links = re.findall(r"\]\(((?!https?:)[^)#]+)\)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page.name
