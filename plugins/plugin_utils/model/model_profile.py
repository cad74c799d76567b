"""Model profiles: what is known of a model and of serving it, read from ``profiles/*.yml`` and a user's own file.

A profile file describes one family. Rows (flags, environment, support) have names, so that a user's file can change
one or take it away with null. Each row holds for versions of one engine, and may hold for some GPU architectures,
weights or models of the family only.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from ..core.errors import InputError
from . import conditions, strict_yaml
from .conditions import SmRange
from .model_shape import PARAMETER_BYTES, Experts, Gqa, Mla, Shape
from .strict_yaml import Document, Named, Table

SHIPPED = Path(__file__).resolve().parent / "profiles"

ENGINES = ("vllm", "sglang", "vllm_cpu", "llama_cpp")
STATES = ("serves", "fails", "unproven")


@dataclass(frozen=True)
class Weights:
    """One checkpoint of a model. ``bytes`` is None where its size is not known; it is then computed from the shape.

    ``experts`` and ``other``: format of routed experts and of all else (embeddings are bf16). ``block``: edge of the
    blocks that FP8 scales are for, 0 where there are none. ``loaded_factor``: bytes on the GPUs for each byte on disk.
    """

    name: str
    experts: str
    other: str
    bytes: float | None = None
    block: int = 0
    loaded_factor: float = 1.0
    repository: str = ""
    source: str = ""


@dataclass(frozen=True)
class Row:
    """When and why something holds. ``why`` and ``source`` are for people."""

    name: str
    engine: str
    versions: SpecifierSet
    why: str
    source: str
    sm: SmRange = field(default_factory=SmRange)
    weights: tuple[str, ...] = ()
    models: tuple[str, ...] = ()

    def holds(self, engine: str, version: str, sm: int | None, weights: str = "") -> bool:
        """Tell whether it holds here. ``sm`` None and weights "" stand for any."""
        return (
            self.engine == engine
            and version in self.versions
            and (sm is None or sm in self.sm)
            and (not weights or not self.weights or weights in self.weights)
        )


@dataclass(frozen=True)
class Flag(Row):
    """A recommended flag. ``value`` True: a bare flag. ``choice``: only for who wants this (text only, MTP ...)."""

    flag: str = ""
    value: str | bool = True
    choice: str = ""

    def words(self) -> str:
        """Return it as on a command line."""
        return self.flag if self.value is True else f"{self.flag} {self.value}"


@dataclass(frozen=True)
class Variable(Row):
    """A recommended environment variable."""

    variable: str = ""
    value: str = ""

    def words(self) -> str:
        """Return it as in an environment file."""
        return f"{self.variable}={self.value}"


@dataclass(frozen=True)
class Forbidden(Row):
    """A flag that must not be used. ``values``: only with these (``fp8*`` is a pattern); none means with any."""

    flag: str = ""
    values: tuple[str, ...] = ()
    instead: str = ""

    def words(self) -> str:
        """Return it as on a command line."""
        return f"{self.flag} {'|'.join(self.values)}" if self.values else self.flag


@dataclass(frozen=True)
class Support(Row):
    """Whether engine and model go together on these GPUs: ``serves``, ``fails`` or ``unproven``."""

    state: str = "unproven"


@dataclass(frozen=True)
class Profile:
    """One model."""

    name: str
    family: str
    title: str
    shape: Shape
    weights: Mapping[str, Weights]
    flags: tuple[Flag, ...] = ()
    variables: tuple[Variable, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()
    support: tuple[Support, ...] = ()
    checked_with: Mapping[str, str] = field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    def of_engine(self, engine: str) -> bool:
        """Tell whether the profile says anything about serving with this engine."""
        return engine in self.checked_with


# --- the schema -----------------------------------------------------------------------------------------------------


def _versions(value: Any, where: str) -> None:
    strict_yaml.text(value, where)
    conditions.versions(value, where)


def _version(value: Any, where: str) -> None:
    strict_yaml.text(value, where)
    conditions.version(value, where)


def _sm(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise InputError(f"{value!r} is no range of GPU architectures", where, 'write "120", "75-88" or "90+"')
    conditions.sm_range(str(value), where)


def _flag(value: Any, where: str) -> None:
    strict_yaml.text(value, where)
    if not value.startswith("-") or " " in value or "=" in value:
        raise InputError(f"{value!r} is no flag", where, "write --name, and its value under value")


_FORMAT = strict_yaml.choice(*PARAMETER_BYTES)
_ROW: Mapping[str, strict_yaml.Spec] = {
    "versions": _versions,
    "why": strict_yaml.text,
    "source": strict_yaml.text,
    "sm": _sm,
    "weights": strict_yaml.texts,
    "models": strict_yaml.texts,
}
_NEEDED = frozenset({"versions", "why", "source"})
_ENGINE = Table(
    {
        "checked_with": _version,
        "recommended": Named(
            Table({"flag": _flag, "value": strict_yaml.scalar, "choice": strict_yaml.text, **_ROW}, _NEEDED | {"flag"})
        ),
        "environment": Named(
            Table({"variable": strict_yaml.text, "value": strict_yaml.scalar, **_ROW}, _NEEDED | {"variable", "value"})
        ),
        "forbidden": Named(
            Table({"flag": _flag, "values": strict_yaml.texts, "instead": strict_yaml.text, **_ROW}, _NEEDED | {"flag"})
        ),
        "support": Named(Table({"state": strict_yaml.choice(*STATES), **_ROW}, _NEEDED | {"state"})),
    },
    frozenset({"checked_with"}),
)
_SIZES = {
    "mla": ("kv_rank", "rope_size", "nope_size", "value_size"),
    "gqa": ("kv_heads", "head_size"),
}
_ATTENTION = Table(
    {
        "kind": strict_yaml.choice(*_SIZES),
        **dict.fromkeys(
            (
                *("kv_rank", "q_rank", "rope_size", "nope_size", "value_size"),
                *("index_heads", "index_size", "index_layers"),
                *("kv_heads", "head_size", "sliding_layers", "window"),
            ),
            strict_yaml.whole,
        ),
    },
)
_SHAPE = Table(
    {
        **dict.fromkeys(
            (
                *("layers", "hidden_size", "vocabulary", "heads", "context"),
                *("dense_layers", "dense_width", "small_reduces_per_layer"),
            ),
            strict_yaml.whole,
        ),
        "tied_head": strict_yaml.yes_no,
        "attention": _ATTENTION,
        "experts": Table(dict.fromkeys(("routed", "active", "width", "shared"), strict_yaml.whole)),
    },
)
_SHAPE_NEEDED = ("layers", "hidden_size", "vocabulary", "heads", "context", "attention")
_WEIGHTS = Table(
    {
        "experts": _FORMAT,
        "other": _FORMAT,
        "size_gb": strict_yaml.number,
        "block": strict_yaml.whole,
        "loaded_factor": strict_yaml.number,
        "repository": strict_yaml.text,
        "source": strict_yaml.text,
    },
    frozenset({"other"}),
)
_MODEL = Table(
    {
        "title": strict_yaml.text,
        "shape": _SHAPE,
        "weights": Named(_WEIGHTS),
        "notes": strict_yaml.texts,
        "source": strict_yaml.text,
    },
    frozenset({"title", "weights"}),
)
SCHEMA = Table(
    {
        "family": strict_yaml.text,
        "title": strict_yaml.text,
        "source": strict_yaml.text,
        "architectures": strict_yaml.texts,
        "shape": _SHAPE,
        "models": Named(_MODEL),
        "engines": Table(dict.fromkeys(ENGINES, _ENGINE)),
    },
    frozenset({"family", "title", "source", "models"}),
)


# --- reading --------------------------------------------------------------------------------------------------------


@functools.cache
def _shipped() -> Mapping[str, Document]:
    found = {}
    for place in sorted(SHIPPED.glob("*.yml")):
        document = strict_yaml.read(place, place.name)
        strict_yaml.check(document, SCHEMA)
        found[str(document.data["family"])] = document
    return found


def profiles(own: Path | None = None) -> dict[str, Profile]:
    """Return all profiles by name: the shipped ones, and those of a user's file merged over.

    Raises InputError, in one line with its place, for a slip in the user's file.
    """
    documents = dict(_shipped())
    if own is not None:
        mine = strict_yaml.read(own)
        family = mine.data.get("family")
        below = documents.get(str(family))
        strict_yaml.check(mine, SCHEMA, complete=below is None)
        if family is None:
            raise InputError("family is missing", mine.name, f"add it: a new name, or one of {', '.join(documents)}")
        data, lines = (below.data, below.lines) if below else ({}, {})
        merged = Document(mine.name, strict_yaml.merge(data, mine.data), {**lines, **mine.lines})
        strict_yaml.check(merged, SCHEMA)
        documents[str(family)] = merged
    found: dict[str, Profile] = {}
    for document in documents.values():
        for profile in _family(document):
            if profile.name in found:
                where = document.where(("models", profile.name))
                raise InputError(f"a model {profile.name} is in {found[profile.name].family} too", where, "rename it")
            found[profile.name] = profile
    return found


def profile(name: str, own: Path | None = None) -> Profile:
    """Return one profile by its name, or by the name of a family that has one model or whose newest is meant.

    Raises InputError, with a near name, where there is none.
    """
    known = profiles(own)
    by_lower = {key.lower(): one for key, one in known.items()}
    for one in known.values():
        by_lower.setdefault(one.family.lower(), one)
        for weights in one.weights.values():
            if weights.repository:
                by_lower.setdefault(weights.repository.lower(), one)
    found = by_lower.get(name.lower())
    if found is not None:
        return found
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    todo = f"did you mean {by_lower[near[0]].name}?" if near else "list them with: peerlane models"
    raise InputError(f"there is no profile {name}", "", f"{todo} For another model give --from-config DIR")


def _family(document: Document) -> list[Profile]:
    data = document.data
    rows = _rows(document)
    checked = {name: str(one["checked_with"]) for name, one in (data.get("engines") or {}).items()}
    models = data["models"]
    bare = next((name for name, one in models.items() if not one["weights"]), "")
    if bare:
        raise InputError(
            "weights are missing", document.where(("models", bare)), "add a checkpoint: bf16: {other: bf16}"
        )
    _check_names(document, models, rows)
    found = []
    for name, model in models.items():
        path = ("models", name)
        shape = strict_yaml.merge(data.get("shape") or {}, model.get("shape") or {})
        mine = [row for row in rows if not row.models or name in row.models]
        found.append(
            Profile(
                name=name,
                family=str(data["family"]),
                title=str(model["title"]),
                shape=_shape(document, shape, (*path, "shape") if model.get("shape") else ("shape",)),
                weights=_weights(model["weights"]),
                flags=tuple(row for row in mine if isinstance(row, Flag)),
                variables=tuple(row for row in mine if isinstance(row, Variable)),
                forbidden=tuple(row for row in mine if isinstance(row, Forbidden)),
                support=tuple(row for row in mine if isinstance(row, Support)),
                checked_with=checked,
                architectures=tuple(data.get("architectures") or ()),
                source=str(model.get("source") or data["source"]),
                notes=tuple(model.get("notes") or ()),
            )
        )
    return found


def _weights(rows: Mapping[str, Any]) -> dict[str, Weights]:
    return {
        name: Weights(
            name=name,
            experts=str(row.get("experts") or row["other"]),
            other=str(row["other"]),
            bytes=float(row["size_gb"]) * 1e9 if row.get("size_gb") else None,
            block=int(row.get("block") or 0),
            loaded_factor=float(row.get("loaded_factor") or 1.0),
            repository=str(row.get("repository") or ""),
            source=str(row.get("source") or ""),
        )
        for name, row in rows.items()
    }


def _shape(document: Document, data: Mapping[str, Any], path: tuple[str, ...]) -> Shape:
    missing = [key for key in _SHAPE_NEEDED if data.get(key) is None]
    if missing:
        raise InputError(f"{missing[0]} is missing", document.where(path), "add it")
    attention = dict(data["attention"])
    kind = attention.pop("kind", None)
    if kind is None:
        raise InputError("kind is missing", document.where((*path, "attention")), f"add it: {' or '.join(_SIZES)}")
    lacks = [key for key in _SIZES[kind] if not attention.get(key)]
    if lacks:
        raise InputError(f"{lacks[0]} is missing for {kind}", document.where((*path, "attention")), "add it")
    allowed = (Mla if kind == "mla" else Gqa).__dataclass_fields__
    foreign = [key for key in attention if key not in allowed]
    if foreign:
        where = document.where((*path, "attention", foreign[0]))
        raise InputError(f"{foreign[0]} does not belong to {kind}", where, "take it out, or correct kind")
    experts = data.get("experts")
    if experts and (lacks := [key for key in ("routed", "active", "width") if not experts.get(key)]):
        raise InputError(f"{lacks[0]} is missing", document.where((*path, "experts")), "add it")
    if not experts and not data.get("dense_width"):
        raise InputError("dense_width is missing for a model without experts", document.where(path), "add it")
    if min(int(data[key]) for key in ("layers", "hidden_size", "vocabulary", "heads", "context")) < 1:
        raise InputError("layers, hidden_size, vocabulary, heads and context are at least 1", document.where(path))
    return Shape(
        layers=data["layers"],
        hidden_size=data["hidden_size"],
        vocabulary=data["vocabulary"],
        heads=data["heads"],
        context=data["context"],
        attention=Mla(**attention) if kind == "mla" else Gqa(**attention),
        experts=Experts(**experts) if experts else None,
        dense_layers=data.get("dense_layers", 0),
        dense_width=data.get("dense_width", 0),
        small_reduces_per_layer=data.get("small_reduces_per_layer", 0),
        tied_head=data.get("tied_head", False),
    )


def _rows(document: Document) -> list[Row]:
    found: list[Row] = []
    for engine, data in (document.data.get("engines") or {}).items():
        for name, row in (data.get("recommended") or {}).items():
            value = row.get("value", True)
            text = value if value is True else str(value)
            found.append(Flag(**_common(name, engine, row), flag=row["flag"], value=text, choice=row.get("choice", "")))
        for name, row in (data.get("environment") or {}).items():
            found.append(Variable(**_common(name, engine, row), variable=row["variable"], value=str(row["value"])))
        for name, row in (data.get("forbidden") or {}).items():
            values = tuple(row.get("values") or ())
            found.append(
                Forbidden(**_common(name, engine, row), flag=row["flag"], values=values, instead=row.get("instead", ""))
            )
        for name, row in (data.get("support") or {}).items():
            found.append(Support(**_common(name, engine, row), state=row["state"]))
    return found


def _common(name: str, engine: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": name,
        "engine": engine,
        "versions": conditions.versions(row["versions"]),
        "why": " ".join(row["why"].split()),
        "source": " ".join(row["source"].split()),
        "sm": conditions.sm_range(str(row["sm"])) if row.get("sm") else SmRange(),
        "weights": tuple(row.get("weights") or ()),
        "models": tuple(row.get("models") or ()),
    }


def _check_names(document: Document, models: Mapping[str, Any], rows: list[Row]) -> None:
    """Refuse a row that names a model or weights which the family does not have: it would never hold."""
    weights = {name for model in models.values() for name in model.get("weights") or {}}
    for row in rows:
        for kind, given, known in (("model", row.models, set(models)), ("weights", row.weights, weights)):
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(name, sorted(known), n=1)
                    todo = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(known))}"
                    section = {Flag: "recommended", Variable: "environment", Forbidden: "forbidden"}.get(
                        type(row), "support"
                    )
                    where = document.where(("engines", row.engine, section, row.name))
                    raise InputError(f"the family has no {kind} {name}", where, todo)
