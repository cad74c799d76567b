"""Views of a snapshot that many judges take, such as the GPU lines of a VM: each is made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..core.snapshot import Snapshot

P = ParamSpec("P")
T = TypeVar("T")


def view(make: Callable[Concatenate[Snapshot, P], T]) -> Callable[Concatenate[Snapshot, P], T]:
    """Decorate a function of a snapshot and of parts of it: what it returns is kept with the snapshot.

    The snapshot is frozen, and so the view stays true; nobody may change what it holds.
    """

    @functools.wraps(make)
    def kept(snapshot: Snapshot, /, *args: P.args, **named: P.kwargs) -> T:
        views: dict[Any, tuple[T, Any]] = snapshot.__dict__.setdefault("_views", {})
        # By identity: a VM's configuration has no hash. The arguments are kept too, so that no other gets their place.
        key = (make, *map(id, args))
        found = views.get(key)
        if found is None:
            found = views[key] = (make(snapshot, *args, **named), args)
        return found[0]

    return kept
