"""What Peerlane knows of each inference engine, as data: the roles and modules ask here and nowhere else.

What a release needs of a host (Python, driver, GPUs, C library) is in ``engine_versions.yml``.

The argument names of llama_cpp are those of its launcher (``roles/inference_engine/files/llama_cpp/serve.py``), which
follow llama-server. Its CPU needs were measured: without AVX2 the wheel ends with SIGILL.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.errors import InputError
from . import engine_matrix


@dataclass(frozen=True)
class Engine:
    """One engine.

    ``versions`` maps each installable version to its lock file, relative to the role's files, newest first.
    ``arguments`` maps what every service has (model, alias, host, port, drain) to the engine's own option.
    ``packages`` are the distribution's packages that the wheels link against (Debian and Ubuntu names).
    ``stop_margin_s`` is added to the drain time before systemd kills.
    """

    name: str
    versions: Mapping[str, str]
    launcher: str
    module: str
    oldest_python: tuple[int, int]
    cpu_flags: tuple[str, ...]
    formats: tuple[str, ...]
    arguments: Mapping[str, str]
    packages: tuple[str, ...]
    disk_mb: int
    stop_margin_s: int
    wants_gpu: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> str:
        """Return the version that is installed where none is named."""
        return next(iter(self.versions))


ENGINES: Mapping[str, Engine] = {
    "llama_cpp": Engine(
        name="llama_cpp",
        versions={"2026.10.11549": "llama_cpp/2026.10.11549.lock"},
        launcher="llama_cpp/serve.py",
        module="xllamacpp",
        oldest_python=engine_matrix.oldest_python("llama_cpp"),
        cpu_flags=engine_matrix.build("llama_cpp").cpu_flags,
        formats=("gguf",),
        arguments={
            "model": "--model",
            "alias": "--alias",
            "host": "--host",
            "port": "--port",
            "drain": "--drain-timeout-s",
        },
        packages=("libgomp1",),
        disk_mb=300,
        stop_margin_s=30,
    ),
}

# Engines of the version matrix that no role installs yet.
PLANNED = tuple(name for name in engine_matrix.engines() if name not in ENGINES)


def engine(name: str, where: str = "inference_engine_name") -> Engine:
    """Return what is known of an engine. Raises InputError, with a near name, where there is none."""
    if name in ENGINES:
        return ENGINES[name]
    have = ", ".join(sorted(ENGINES))
    if name in PLANNED:
        raise InputError(f"{name} is not in this release of Peerlane", where, f"available: {have}")
    near = difflib.get_close_matches(str(name), [*ENGINES, *PLANNED], n=1)
    hint = f"did you mean {near[0]}?" if near else f"available: {have}"
    raise InputError(f"{name!r} is no engine that Peerlane knows", where, hint)


def version_of(one: Engine, version: str, where: str = "inference_engine_version") -> str:
    """Return the version to install: the newest for "" or ``newest``. Raises InputError for one without a lock."""
    if version in ("", "newest"):
        return one.newest
    if version not in one.versions:
        have = ", ".join(one.versions)
        raise InputError(f"{one.name} {version!r} has no lock in this release of Peerlane", where, f"available: {have}")
    return version
