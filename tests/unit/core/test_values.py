"""Frozen values that are cheap to make behave as those of ``dataclasses``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field, replace

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.values import by_identity, changed, fast_init


@dataclass(frozen=True)
class Plain:
    name: str
    count: int | None = None
    words: tuple[str, ...] = ("a",)
    table: Mapping[str, int] = field(default_factory=dict)


@fast_init
@dataclass(frozen=True)
class Quick:
    name: str
    count: int | None = None
    words: tuple[str, ...] = ("a",)
    table: Mapping[str, int] = field(default_factory=dict)


def test_the_signature_and_the_defaults_are_those_of_dataclasses() -> None:
    assert list(inspect.signature(Quick).parameters) == list(inspect.signature(Plain).parameters)
    assert vars(Quick("n")) == vars(Plain("n"))
    assert vars(Quick("n", 3, words=(), table={"x": 1})) == vars(Plain("n", 3, words=(), table={"x": 1}))
    assert list(vars(Quick("n", table={}, count=1))) == ["name", "count", "words", "table"]


def test_a_default_that_is_made_is_made_anew() -> None:
    assert Quick("n").table is not Quick("n").table


@pytest.mark.parametrize("arguments", [((), {}), (("n", 1, (), {}, 5), {}), (("n",), {"other": 1})])
def test_a_wrong_call_is_refused(arguments: tuple[tuple[object, ...], dict[str, object]]) -> None:
    with pytest.raises(TypeError, match=r"Quick\.__init__"):
        Quick(*arguments[0], **arguments[1])  # type: ignore[arg-type]


def test_a_value_stays_frozen_and_compares_by_its_fields() -> None:
    one = Quick("n", 1)
    with pytest.raises(FrozenInstanceError):
        one.name = "m"  # type: ignore[misc]
    assert one == Quick("n", 1) != Quick("n", 2)
    assert replace(one, count=2) == Quick("n", 2)


def test_a_changed_value_is_a_copy() -> None:
    one = Quick("n", 1, table={"x": 1})
    two = changed(one, count=2)
    assert (one.count, two) == (1, Quick("n", 2, table={"x": 1}))
    assert type(two) is Quick


def test_a_result_is_remembered_for_the_same_objects_and_only_for_them() -> None:
    made = []

    @by_identity(2)
    def joined(first: list[int], second: list[int]) -> tuple[int, ...]:
        made.append((first, second))
        return (*first, *second)

    one, same = [1], [1]
    assert joined(one, one) is joined(one, one)
    assert joined(one, same) == joined(same, one) == (1, 1)
    assert len(made) == 3
    for number in range(100):  # results of values that are gone are never given for new ones in their place
        assert joined([number], one) == (number, 1)
