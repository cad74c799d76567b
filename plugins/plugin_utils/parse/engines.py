"""Serving engines as processes, units, containers and start scripts tell them, with their limits and containers."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..core.runtime import Container, Engine, P2pCache
from .text import RefusedError, files, lines, size_bytes

# How a command line shows which engine it starts.
_ENGINES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("vllm", re.compile(r"\bvllm serve\b|\bvllm\.entrypoints\b|/vllm(?:\s|$)|^vllm\b")),
    ("sglang", re.compile(r"\bsglang\.launch_server\b|\bsglang serve\b|\bsglang\.srt\b")),
    ("llama_cpp", re.compile(r"\bllama-server\b|\bllama_cpp\b|/peerlane-serve\b")),
)
# The variables that Peerlane looks at. Nothing else of an environment is kept, keys and tokens least of all.
_VARIABLES = frozenset(
    {
        "CUDA_DEVICE_ORDER",
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "PATH",
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_CACHE_ROOT",
        "VLLM_NCCL_SO_PATH",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_USE_NCCL_SYMM_MEM",
    }
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED", re.IGNORECASE)
# --max-num-batched-tokens and --tokenizer hold no secret; --api-key takes several values.
_SECRET_OPTION = re.compile(
    r"((?:^|\s)--?(?:[\w-]*[-_])?(?:api[-_]?keys?|token|password|secret)(?![\w-])(?:=|\s+))"
    r"((?:\"[^\"]*\"|'[^']*'|[^\s-]\S*)(?:\s+(?:\"[^\"]*\"|'[^']*'|[^\s-]\S*))*)",
    re.IGNORECASE,
)

_HEADER = re.compile(r"# ==> (?:engine pid (\d+)|unit (\S+)) <==")
_LIMIT = re.compile(r"limit (Max [a-z ]+): (-?\d+)")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Z][A-Z0-9_]*)=(\"[^\"]*\"|'[^']*'|[^\s;]*)")


def wanted_variable(name: str) -> bool:
    """Whether Peerlane keeps this variable of an engine's environment."""
    return (name.startswith("NCCL_") or name in _VARIABLES) and not _SECRET.search(name)


def engine_name(command: str) -> str:
    """Return which engine a command line starts, or ""."""
    return next((name for name, pattern in _ENGINES if pattern.search(command)), "")


def masked(command: str) -> str:
    """Return a command line without the values of its keys, tokens and passwords."""
    return _SECRET_OPTION.sub(r"\1***", command)


def options(command: str) -> dict[str, str]:
    """Return the options of a command line: ``--port 8000`` and ``--port=8000`` alike; "" for a bare flag."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    found: dict[str, str] = {}
    for at, word in enumerate(words):
        if not word.startswith("-") or word.lstrip("-").isdigit():
            continue
        name, equals, value = word.partition("=")
        following = words[at + 1] if at + 1 < len(words) else ""
        found[name] = value if equals else "" if following.startswith("-") else following
    return found


# --- the collector's own format -------------------------------------------------------------------------------------


def processes(text: str, source: str) -> tuple[Engine, ...]:
    """Read the source ``engines``: one block ``# ==> engine pid N <==`` for each process."""
    found: list[Engine] = []
    for row in lines(text):
        header = _HEADER.fullmatch(row.strip())
        if header and header[1]:
            found.append(Engine("", f"process {header[1]}", pid=int(header[1]), source=source))
        elif found and not header:
            found[-1] = _told(found[-1], row)
    return tuple(_named(one) for one in found if one.name or one.command)


def _told(engine: Engine, row: str) -> Engine:
    key, colon, value = row.partition(": ")
    if row.startswith("Environment "):
        name, equals, setting = row[len("Environment ") :].partition("=")
        if equals and wanted_variable(name):
            return replace(engine, environment={**engine.environment, name: setting})
    elif limit := _LIMIT.fullmatch(row):
        return replace(engine, limits={**engine.limits, limit[1]: int(limit[2])})
    elif colon and key == "name":
        return replace(engine, name=value)
    elif colon and key == "command":
        return replace(engine, command=masked(value))
    elif key == "unit" and value:
        return replace(engine, origin=f"unit {value}")
    elif key == "environment":
        return replace(engine, environment_known=value == "read")
    elif key == "shm_bytes" and value.isdigit():
        return replace(engine, shm_bytes=int(value))
    elif key == "shm_private":
        return replace(engine, shm_private=value == "yes")
    elif key == "container" and value:
        return replace(engine, container=Container(identity=value))
    elif key == "docker" and value:
        container = _container(_json(value))
        if container is not None:
            return replace(engine, container=container, origin=f"container {container.name or container.identity}")
    return engine


def _named(engine: Engine) -> Engine:
    return replace(engine, name=engine.name or engine_name(engine.command), options=options(engine.command))


# --- docker inspect -------------------------------------------------------------------------------------------------


def docker_inspect(text: str, source: str) -> tuple[Engine, ...]:
    """Read a pasted ``docker inspect``: containers that start an engine, or that ask for GPUs.

    Of its ``Env`` only the listed variables are kept.
    """
    start = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=0)
    document = _json(text[start:])
    rows = document if isinstance(document, list) else [document]
    found = []
    for row in rows:
        container = _container(row)
        if container is None:
            continue
        config = row.get("Config") if isinstance(row.get("Config"), Mapping) else {}
        words = [str(one) for part in ("Entrypoint", "Cmd") for one in config.get(part) or () if isinstance(one, str)]
        pairs = [str(one).partition("=") for one in config.get("Env") or ()]
        command = masked(shlex.join(words))
        found.append(
            Engine(
                engine_name(command) or engine_name(str(config.get("Image", ""))) or "container",
                f"container {container.name or container.identity}",
                command=command,
                options=options(command),
                environment={name: value for name, _, value in pairs if wanted_variable(name)},
                environment_known=isinstance(config.get("Env"), list),
                shm_bytes=container.shm_bytes if container.ipc_mode != "host" else None,
                container=container,
                source=source,
            )
        )
    if not found:
        raise RefusedError("no container with a HostConfig in it")
    return tuple(found)


def _container(row: Any) -> Container | None:
    """Read one container: the shape of ``docker inspect``, or the collector's selection with the same names."""
    if not isinstance(row, Mapping):
        return None
    host = row.get("HostConfig", row)
    if not isinstance(host, Mapping) or not ({"ShmSize", "IpcMode"} & set(host)):
        return None
    ulimits = {
        str(one["Name"]): int(one["Soft"])
        for one in host.get("Ulimits") or ()
        if isinstance(one, Mapping) and isinstance(one.get("Soft"), int) and "Name" in one
    }
    shm = host.get("ShmSize")
    return Container(
        name=str(row.get("Name") or "").lstrip("/"),
        identity=str(row.get("Id") or "")[:12],
        ipc_mode=_word(host.get("IpcMode")),
        pid_mode=_word(host.get("PidMode")),
        runtime=_word(host.get("Runtime")),
        shm_bytes=shm if isinstance(shm, int) and shm > 0 else None,
        capabilities=tuple(str(one) for one in host.get("CapAdd") or ()),
        ulimits=ulimits,
    )


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _json(text: str) -> Any:
    try:
        found, _ = json.JSONDecoder().raw_decode(text.strip())
    except (ValueError, RecursionError):
        return None
    return found


# --- units and scripts ----------------------------------------------------------------------------------------------


def unit_file(text: str, source: str) -> tuple[Engine, ...]:
    """Read a pasted unit or drop-in: its command, and the listed variables of its ``Environment=`` lines."""
    environment: dict[str, str] = {}
    limits: dict[str, int] = {}
    command = ""
    for row in _joined(lines(text)):
        key, equals, value = row.strip().partition("=")
        if not equals:
            continue
        if key == "Environment":
            for word in _words(value):
                name, given, setting = word.partition("=")
                if given and wanted_variable(name):
                    environment[name] = setting
        elif key in ("ExecStart", "ExecStart+") and value.strip():
            command = masked(value.strip())
        elif key in ("LimitMEMLOCK", "LimitNOFILE", "LimitSTACK"):
            limit = _unit_limit(value)
            if limit is not None:
                limits[_UNIT_LIMITS[key]] = limit
    if not (environment or limits or engine_name(command)):
        return ()
    return (
        Engine(
            engine_name(command),
            "unit file",
            command=command,
            options=options(command),
            environment=environment,
            environment_known=False,
            limits=limits,
            source=source,
        ),
    )


_UNIT_LIMITS = {
    "LimitMEMLOCK": "Max locked memory",
    "LimitNOFILE": "Max open files",
    "LimitSTACK": "Max stack size",
}


def _unit_limit(value: str) -> int | None:
    soft = value.strip().partition(":")[0]
    return -1 if soft == "infinity" else size_bytes(soft)


def script(text: str, source: str) -> tuple[Engine, ...]:
    """Read a start script: each engine that it starts, with the variables that stand before it."""
    environment: dict[str, str] = {}
    found: list[Engine] = []
    for row in _joined(lines(text)):
        command = row.strip()
        if command.startswith("#"):
            continue
        before = dict(environment)
        for name, value in _ASSIGNMENT.findall(command):
            if wanted_variable(name):
                before[name] = value.strip("\"'")
        name = engine_name(command)
        if not name:
            # An export stays; a variable before one command does not.
            if command.startswith("export ") or _ASSIGNMENT.fullmatch(command):
                environment = before
            continue
        command = masked(re.sub(r"\s*(?:\d?>|&)\s*.*$", "", command))
        found.append(
            Engine(
                name,
                f"script, start {len(found) + 1}",
                command=command,
                options=options(command),
                environment=before,
                environment_known=False,
                source=source,
            )
        )
    return tuple(found)


def _joined(rows: Sequence[str]) -> list[str]:
    """Join lines that end in a backslash with the next."""
    joined: list[str] = []
    open_ = False
    for row in rows:
        if open_:
            joined[-1] += " " + row.strip()
        else:
            joined.append(row)
        open_ = joined[-1].endswith("\\")
        if open_:
            joined[-1] = joined[-1][:-1].rstrip()
    return joined


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


# --- limits, shared memory, device rules ----------------------------------------------------------------------------

_PROC_LIMIT = re.compile(r"\s*(Max [a-z ]+?)\s{2,}(unlimited|\d+)\s{2,}(?:unlimited|\d+)(?:\s{2,}\w+)?\s*")
# What `ulimit -a` prints, with the unit that it counts in.
_ULIMIT = re.compile(r"(max locked memory|open files|stack size)\s+\((?:(kbytes), )?-\w\)\s+(unlimited|\d+)")
_DF = re.compile(
    r"^(?:shm|tmpfs|none)\s+(\d[\d.]*[KMGT]?)\s+\d[\d.]*[KMGT]?\s+\d[\d.]*[KMGT]?\s+\d+%\s+/dev/shm\s*$", re.MULTILINE
)


def limits(text: str) -> dict[str, int]:
    """Read ``/proc/PID/limits`` or ``ulimit -a``: soft limits in bytes or counts, -1 for unlimited."""
    found: dict[str, int] = {}
    for row in lines(text):
        proc = _PROC_LIMIT.fullmatch(row[:200])
        if proc:
            found[proc[1]] = -1 if proc[2] == "unlimited" else int(proc[2])
            continue
        shell = _ULIMIT.match(row.strip()[:200])
        if shell:
            name = "Max " + shell[1].removeprefix("max ")
            factor = 1024 if shell[2] else 1
            found[name] = -1 if shell[3] == "unlimited" else int(shell[3]) * factor
    return found


def shm_bytes(text: str) -> tuple[int, str] | None:
    """Return the size of ``/dev/shm`` by ``df``, and its line. Without a letter it is KiB, with -B1 bytes."""
    rows = lines(text)
    in_bytes = any("1B-blocks" in row for row in rows)
    for row in rows:
        found = _DF.match(row)
        if found:
            size = found[1]
            if size[-1].isalpha():
                whole, _, part = size[:-1].partition(".")
                unit = size_bytes("1" + size[-1]) or 0
                return int(float(f"{whole}.{part or 0}") * unit), row.strip()
            return int(float(size)) * (1 if in_bytes else 1024), row.strip()
    return None


def device_rules(text: str) -> tuple[str, ...]:
    """Return the rules of a cgroup's device list; where a text holds a before and an after, those after."""
    blocks: list[list[str]] = [[]]
    for row in lines(text):
        if re.fullmatch(r"[abc] \d+:(?:\d+|\*) [rwm]+", row.strip()):
            blocks[-1].append(row.strip())
        elif row.startswith("---"):
            blocks.append([])
    return tuple(next((block for block in reversed(blocks) if block), []))


# --- stored P2P verdicts --------------------------------------------------------------------------------------------

_CACHE_HEADER = re.compile(r"(\S+) modified (\d+)")


def p2p_caches(text: str) -> tuple[P2pCache, ...]:
    """Read the source ``p2p_caches``: files such as ``{"0->0": true, "0->1": false}``, each with its time."""
    found = []
    for path, body in files(text):
        told = _CACHE_HEADER.fullmatch(path)
        document = _json(body)
        access = {}
        for key, value in document.items() if isinstance(document, dict) else ():
            first, arrow, second = str(key).partition("->")
            if arrow and isinstance(value, bool) and first != second:
                access[f"GPU{first}", f"GPU{second}"] = value
        if access or told:
            found.append(P2pCache(told[1] if told else path, int(told[2]) if told else None, access))
    return tuple(found)
