"""Toolkits side by side."""

from __future__ import annotations

from typing import Any

import driver_builders as make
import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import cuda_plan

QUERY = """Name: cuda
Link: /usr/local/cuda
Status: auto
Best: /usr/local/cuda-13.0
Value: /usr/local/cuda-13.0

Alternative: /usr/local/cuda-12.8
Priority: 128

Alternative: /usr/local/cuda-13.0
Priority: 130
"""


def test_the_highest_version_is_the_default() -> None:
    found = cuda_plan.plan(make.facts(), {"versions": ["12.10", "12.9"]})

    assert found.default == "12.10"
    assert found.install == ("cuda-toolkit-12-10", "cuda-toolkit-12-9")
    assert found.register == ("12.10", "12.9")


def test_a_default_that_is_set_already_is_left() -> None:
    facts = make.facts(alternatives=QUERY)

    assert cuda_plan.plan(facts, {"versions": ["12.8", "13.0"]}).default_path == ""
    changed = cuda_plan.plan(facts, {"versions": ["12.8", "13.0"], "default_version": "12.8"})
    assert (changed.default_path, changed.register) == ("/usr/local/cuda-12.8", ())


def test_a_version_that_the_repository_lacks_stops() -> None:
    facts = make.facts(
        repositories=make.repositories(make.NVIDIA),
        policy=make.policy(("cuda-toolkit-13-0", "13.0.2-1", make.NVIDIA, "")),
    )
    assert cuda_plan.plan(facts, {"versions": ["12.8", "13.0"]}).stops == (), "apt was not asked yet"
    facts["asked"] = ["cuda-toolkit-12-8", "cuda-toolkit-13-0"]

    stops = cuda_plan.plan(facts, {"versions": ["12.8", "13.0"]}).stops

    assert len(stops) == 1
    assert stops[0].startswith("cuda-toolkit-12-8 is not in NVIDIA's repository")


def test_only_the_parts_of_a_version_to_remove_are_named() -> None:
    names = (
        "cuda-toolkit-12-8",
        "libcublas-12-8",
        "cuda-toolkit-12-8-config-common",
        "cuda-toolkit-12-80",
        "cuda-nvcc-13-0",
    )
    facts = make.facts(packages="".join(f"ii \t{name}\t1\n" for name in names))

    assert cuda_plan.plan(facts, {"absent_versions": ["12.8"]}).remove == names[:3]


def test_nothing_asked_is_nothing_done() -> None:
    assert cuda_plan.plan(make.facts("ID=arch\n"), {"versions": []}) == cuda_plan.Toolkits()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"versions": ["12"]}, "cuda_toolkit_versions: '12' is no CUDA version"),
        ({"versions": "12.8"}, "cuda_toolkit_versions: '12.8' is no list"),
        ({"versions": ["12.8"], "absent_versions": ["12.8"]}, "cuda_toolkit_absent_versions: 12.8 is also in"),
        ({"versions": ["12.8"], "default_version": "13.0"}, "cuda_toolkit_default_version: '13.0' is not one of 12.8"),
    ],
)
def test_a_wish_that_cannot_be_understood_is_named(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        cuda_plan.plan(make.facts(), options)

    assert line in caught.value.line()
