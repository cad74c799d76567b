"""Plan one release of a model service: arguments, environment, a name made of its content, and what stands in its way.

A release is immutable. The same settings give the same name, so that a second run changes nothing and an older release
can be switched back to.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import InputError
from .engines import Engine

RELEASE_SCHEMA = "peerlane.release/1"

_SERVICE = re.compile(r"[a-z][a-z0-9-]{0,47}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# Folders that the unit hides from the service (ProtectHome=yes).
_HIDDEN = ("/home/", "/root/", "/run/user/")


@dataclass(frozen=True)
class Settings:
    """What a user wants served. Times in seconds."""

    service: str
    engine_home: str
    model_path: str
    alias: str
    host: str
    port: int
    arguments: Mapping[str, Any] | Sequence[Any]
    environment: Mapping[str, Any]
    drain_timeout_s: int


def plan(engine: Engine, settings: Settings, nccl: str, created_from: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``id``, ``args`` and ``env`` (the texts of two files) and ``record`` (release.json without its time).

    ``nccl`` is the text of the NCCL environment file of the host: the service restarts when it changes.
    ``created_from`` is kept in the record and is no part of the id (golden prompt, engine and model versions).
    Raises InputError for settings that can't work.
    """
    if not _SERVICE.fullmatch(settings.service):
        raise InputError(
            f"{settings.service!r} is no service name",
            "model_service_name",
            "small letters, digits and dashes, 48 at most",
        )
    if not 1024 <= settings.port <= 65535:
        raise InputError(
            f"port {settings.port} can't be used by a service without privileges",
            "model_service_port",
            "choose 1024 to 65535",
        )
    for path, where, role in (
        (settings.engine_home, "model_service_engine_home", "inference_engine"),
        (settings.model_path, "model_service_model_path", "model_weights"),
    ):
        if not path.startswith("/"):
            raise InputError(f"{path!r} is no absolute path", where, f"run the role {role} first, or set it")
    own = {
        engine.arguments["model"]: settings.model_path,
        engine.arguments["alias"]: settings.alias,
        engine.arguments["host"]: settings.host,
        engine.arguments["port"]: str(settings.port),
        engine.arguments["drain"]: str(settings.drain_timeout_s),
    }
    words = [word for pair in own.items() for word in pair] + _arguments(settings.arguments, own)
    environment = {**engine.environment, **_environment(settings.environment)}
    identity = {
        "engine_home": settings.engine_home,
        "args": words,
        "env": environment,
        "nccl": nccl,
    }
    text = json.dumps(identity, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    record = {
        "schema": RELEASE_SCHEMA,
        "service": settings.service,
        "id": name,
        "engine": engine.name,
        "engine_home": settings.engine_home,
        "model": settings.model_path,
        "model_name": settings.alias,
        "url": local_url(settings.host, settings.port),
        "args": words,
        # Names only: values can be keys. They are in the file env beside it, for root alone.
        "env_names": sorted(environment),
        "nccl": nccl_variables(nccl),
        **created_from,
    }
    return {
        "id": name,
        "args": "".join(f"{word}\n" for word in words),
        "env": environment_text(environment),
        "record": record,
        "stop_timeout_s": settings.drain_timeout_s + engine.stop_margin_s,
        "private_devices": not engine.wants_gpu,
    }


def local_url(host: str, port: int) -> str:
    """Return where a service is reached from its own host: one for all interfaces is asked on the loopback one."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  only compared
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def _arguments(given: Mapping[str, Any] | Sequence[Any], own: Mapping[str, str]) -> list[str]:
    words = words_of(given) if isinstance(given, Mapping) else [str(word) for word in given]
    for word in words:
        if "\n" in word or "\r" in word:
            raise InputError(f"{word!r} spans lines", "model_service_args", "write JSON values on one line")
        option = word.partition("=")[0]
        if option in own:
            raise InputError(
                f"{option} is set by the role",
                "model_service_args",
                "use the role's variable for it and remove it here",
            )
    return words


def words_of(given: Mapping[str, Any]) -> list[str]:
    """Return a dictionary of arguments as words: ``ctx_size: 8192`` becomes ``--ctx-size 8192``, true a bare flag."""
    words: list[str] = []
    for name, value in given.items():
        option = "--" + str(name).lstrip("-").replace("_", "-")
        if value is False or value is None:
            continue
        words.append(option)
        if value is True:
            continue
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            words += [str(one) for one in value]
        else:
            words.append(str(value))
    return words


def _environment(given: Mapping[str, Any]) -> dict[str, str]:
    checked = {}
    for name, value in given.items():
        if not _ENV_NAME.fullmatch(str(name)):
            raise InputError(
                f"{name!r} is no name of an environment variable", "model_service_env", "letters, digits, _"
            )
        text = "1" if value is True else "0" if value is False else str(value)
        if "\n" in text or "\r" in text or "\0" in text:
            raise InputError(f"the value of {name} spans lines", "model_service_env", "write it on one line")
        checked[str(name)] = text
    return checked


def environment_text(environment: Mapping[str, str]) -> str:
    """Return a systemd EnvironmentFile. Values are quoted, because systemd strips blanks and reads backslashes."""
    lines = []
    for name in sorted(environment):
        value = re.sub(r'([\\"`$])', r"\\\1", environment[name])
        lines.append(f'{name}="{value}"\n')
    return "".join(lines)


def nccl_variables(text: str) -> dict[str, str]:
    """Return the variables of an NCCL environment file."""
    pairs = [line.partition("=") for line in text.splitlines() if "=" in line and not line.lstrip().startswith("#")]
    return {name.strip(): value.strip() for name, _, value in pairs}


def obstacles(
    engine: Engine, settings: Settings, unit: str, seen: Mapping[str, Any], still_to_come: bool
) -> tuple[str, ...]:
    """Return in one line each what keeps this release from starting, as far as it can be known before.

    ``seen`` is what the module ``model_service_info`` returned. With ``still_to_come`` (a check run on a new host) an
    engine or a model that is not there yet is no obstacle.
    """
    found = []
    if not seen.get("systemd"):
        found.append("this host does not run systemd (a plain container?): a model service needs it")
    record = seen.get("engine") or {}
    if not record and not still_to_come:
        found.append(
            f"no engine in {settings.engine_home} (engine.json is missing): run the role inference_engine first"
        )
    elif record and record.get("engine") != engine.name:
        found.append(
            f"{settings.engine_home} holds {record.get('engine')}, not {engine.name}: check inference_engine_home"
        )
    model = seen.get("model") or {}
    if settings.model_path.startswith(_HIDDEN):
        found.append(f"model {settings.model_path} lies where the service's sandbox can't see it: move it below /opt")
    elif not model.get("exists"):
        if not still_to_come:
            found.append(f"model {settings.model_path} does not exist: run the role model_weights, or check the path")
    elif model.get("complaint"):
        found.append(f"model {settings.model_path}: {model['complaint']}")
    elif not set(model.get("formats") or ()) & set(engine.formats):
        have = ", ".join(model.get("formats") or ()) or "neither *.gguf nor config.json with *.safetensors"
        found.append(
            f"{settings.model_path} is no model for {engine.name}: it needs {'/'.join(engine.formats)}, found {have}"
        )
    owner = seen.get("port_owner") or {}
    if owner and owner.get("unit") != unit:
        who = owner.get("command") or "a process that can't be seen"
        where = f" of {owner['unit']}" if owner.get("unit") else ""
        pid = f" (pid {owner['pid']})" if owner.get("pid") else ""
        found.append(f"port {settings.port} is taken by {who}{pid}{where}: stop it, or set model_service_port")
    return tuple(found)
