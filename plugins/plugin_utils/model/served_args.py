"""What a profile says about the arguments of an engine: which to give, which never to give, and what the user gave.

Pure functions of data: nothing here asks an engine. Whether an option exists at all is for the engine's own parser to
say.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from ..core.errors import InputError
from . import conditions
from .fit import Layout, format_problem, impossible
from .model_profile import Flag, Forbidden, Profile, Support, Variable
from .release import words_of

# The same option under several names. Underscores count as dashes in both engines.
_SAME: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "--tp": "--tensor-parallel-size",
    "--tp-size": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--pp-size": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "--dp": "--data-parallel-size",
    "--dp-size": "--data-parallel-size",
    "-ep": "--enable-expert-parallel",
    "--fp8-gemm-runner-backend": "--fp8-gemm-backend",
}


@dataclass(frozen=True)
class Advice:
    """One flag or variable to give, with the reason and who says so."""

    words: str
    why: str
    source: str

    def line(self) -> str:
        """Return the one line that a user reads."""
        return f"{self.words}: {self.why} [{self.source}]"


@dataclass(frozen=True)
class CheckedArgs:
    """What is wrong with the arguments of a service, and what is missing from them.

    ``obstacles`` stop it, in one line each; ``additions`` are advice; ``notes`` say what is not known or was overruled.
    """

    obstacles: tuple[str, ...] = ()
    additions: tuple[Advice, ...] = ()
    notes: tuple[str, ...] = ()


def options(args: Mapping[str, Any] | Sequence[Any], where: str = "model_service_args") -> dict[str, tuple[str, ...]]:
    """Return the options of a command line or dictionary with their values; a bare flag has none.

    Names are made the same: underscores are dashes, and short names are the long ones. Raises InputError for a string.
    """
    if isinstance(args, str):
        raise InputError("is one string", where, "write a dictionary, or a list with one word for each item")
    words = words_of(args) if isinstance(args, Mapping) else [str(word) for word in args]
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for word in words:
        if _is_option(word):
            option, mark, value = word.partition("=")
            name = _name(option)
            found[name] = (value,) if mark else ()
        elif name:
            found[name] = (*found[name], word)
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit() and word != "-"


def _name(option: str) -> str:
    # A dotted part (--kernel-config.enable_x) is a key of a JSON value, which keeps its underscores.
    head, dot, key = option.partition(".")
    if head.startswith("--"):
        head = "--" + head[2:].replace("_", "-")
    return _SAME.get(head, head) + dot + key


def recommended(profile: Profile, engine: str, version: str, sm: int | None, weights: str = "") -> tuple[Flag, ...]:
    """Return the flags to give, options (``choice``) included. Of two rows for one flag the last that holds wins."""
    chosen: dict[tuple[str, str], Flag] = {}
    for row in profile.flags:
        if row.holds(engine, version, sm, weights):
            # Rows for other weights or GPUs stand side by side where it is not said which these are.
            key = (row.flag, row.choice or ("" if sm is not None and weights else row.name))
            chosen[key] = row
    return tuple(chosen.values())


def variables(profile: Profile, engine: str, version: str, sm: int | None, weights: str = "") -> tuple[Variable, ...]:
    """Return the environment variables to set."""
    return tuple(row for row in profile.variables if row.holds(engine, version, sm, weights))


def forbidden(profile: Profile, engine: str, version: str, sm: int | None, weights: str = "") -> tuple[Forbidden, ...]:
    """Return the flags that must not be given."""
    return tuple(row for row in profile.forbidden if row.holds(engine, version, sm, weights))


def support(profile: Profile, engine: str, version: str, sm: int | None, weights: str = "") -> tuple[Support, ...]:
    """Return what is known of engine, GPU and checkpoint together."""
    return tuple(row for row in profile.support if row.holds(engine, version, sm, weights))


def kv_dtype(
    profile: Profile, engine: str, version: str, sm: int | None, weights: str, given: Mapping[str, Sequence[str]]
) -> str:
    """Return the type of the KV cache, bf16 or fp8: the one given, else the recommended one."""
    values = list(given.get("--kv-cache-dtype", ()))
    if not values and sm is not None:
        rows = recommended(profile, engine, version, sm, weights)
        values = [str(row.value) for row in rows if row.flag == "--kv-cache-dtype" and not row.choice]
    return "fp8" if values and values[-1].lower().startswith("fp8") else "bf16"


def checked_args(
    profile: Profile,
    engine: str,
    version: str,
    sm: int | None,
    args: Mapping[str, Any] | Sequence[Any],
    weights: str = "",
    environment: Mapping[str, Any] | None = None,
) -> CheckedArgs:
    """Hold the arguments of a service against a profile, before the old service is stopped.

    ``sm``: architecture of the GPUs (120), None where it is not known: rows for certain GPUs are notes then.
    ``weights``: name of the checkpoint in the profile, "" where it is not known. Raises InputError for arguments that
    are one string, an unknown checkpoint, or a version that is none.
    """
    conditions.version(version, "engine version")
    if weights and weights not in profile.weights:
        near = difflib.get_close_matches(weights, list(profile.weights), n=1)
        todo = f"did you mean {near[0]}?" if near else f"it has {', '.join(profile.weights)}"
        raise InputError(f"{profile.name} has no checkpoint {weights}", "", todo)
    given = options(args)
    obstacles: list[str] = []
    notes: list[str] = []
    if not profile.of_engine(engine):
        notes.append(f"the profile {profile.name} says nothing about {engine}")
    elif Version(version) > Version(profile.checked_with[engine]):
        notes.append(
            f"the profile {profile.name} was checked with {engine} {profile.checked_with[engine]}, which is older than "
            f"{version}"
        )
    for row in forbidden(profile, engine, version, sm, weights):
        used = _used(row, given)
        if not used:
            continue
        line = f"{used}: {row.why}" + (f"; use {row.instead}" if row.instead else "; leave it out") + f" [{row.source}]"
        certain = (sm is not None or not row.sm.bounds) and (bool(weights) or not row.weights)
        if certain:
            obstacles.append(line)
        else:
            limits = [f"on SM {row.sm}"] if row.sm.bounds and sm is None else []
            limits += [f"with {' or '.join(row.weights)} weights"] if row.weights and not weights else []
            notes.append(f"{' and '.join(limits)}, {line}")
    obstacles += _failing(profile, engine, version, sm, weights)
    obstacles += _layout(profile, given, engine, sm, weights)
    additions = _missing(profile, engine, version, sm, weights, given, environment or {}, notes)
    return CheckedArgs(tuple(obstacles), tuple(additions), tuple(notes))


def _used(row: Forbidden, given: Mapping[str, Sequence[str]]) -> str:
    """Return the forbidden option as it was given, or ""."""
    name = _name(row.flag)
    if name not in given:
        return ""
    if not row.values:
        return " ".join((row.flag, *given[name]))
    for value in given[name]:
        if any(fnmatch.fnmatchcase(value.lower(), pattern.lower()) for pattern in row.values):
            return f"{row.flag} {value}"
    return ""


def _failing(profile: Profile, engine: str, version: str, sm: int | None, weights: str) -> list[str]:
    if sm is None:
        return []
    rows = support(profile, engine, version, sm, weights)
    # A report of success for one checkpoint or model outweighs one of failure for all of them.
    if any(row.state == "serves" for row in rows):
        return []
    return [
        f"{profile.name} does not run in {engine} {version} on SM {sm}: {row.why} [{row.source}]"
        for row in rows
        if row.state == "fails" and (weights or not row.weights)
    ]


def _layout(
    profile: Profile, given: Mapping[str, Sequence[str]], engine: str, sm: int | None, weights: str
) -> list[str]:
    """Return what the hard rules say of the layout and the checkpoint's number format."""
    sizes = []
    for name in ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"):
        value = (given.get(name) or ("1",))[-1]
        if not value.isdigit() or int(value) < 1:
            return [f"{name} {value}: that is no number of GPUs"]
        sizes.append(int(value))
    spread = "--enable-expert-parallel" in given or (given.get("--ep-size") or ("1",))[-1] != "1"
    layout = Layout(sizes[0], sizes[1], sizes[2], spread)
    checkpoint = profile.weights.get(weights)
    found = []
    if checkpoint is not None:
        found.append(impossible(profile.shape, checkpoint, layout))
        found.append(format_problem(checkpoint, engine, sm)[0])
    elif profile.shape.heads % layout.tensor:
        found.append(impossible(profile.shape, next(iter(profile.weights.values())), layout))
    return [one for one in found if one]


def _missing(
    profile: Profile,
    engine: str,
    version: str,
    sm: int | None,
    weights: str,
    given: Mapping[str, Sequence[str]],
    environment: Mapping[str, Any],
    notes: list[str],
) -> list[Advice]:
    """Return what is recommended and not given; a choice is nobody's lack."""
    found = []
    for row in recommended(profile, engine, version, sm, weights):
        uncertain = (sm is None and row.sm.bounds) or (not weights and row.weights)
        if row.choice or uncertain:
            continue
        values = given.get(_name(row.flag))
        if values is None:
            found.append(Advice(row.words(), row.why, row.source))
        elif row.value is not True and list(values) != [row.value] and values:
            notes.append(
                f"{row.flag} {' '.join(values)} is given; recommended is {row.value}: {row.why} [{row.source}]"
            )
    for variable in variables(profile, engine, version, sm, weights):
        uncertain = (sm is None and variable.sm.bounds) or (not weights and variable.weights)
        if not uncertain and variable.variable not in environment:
            found.append(Advice(variable.words(), variable.why, variable.source))
    return found
