# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sources about serving engines: their processes with limits and containers, what they stored, NCCL's own files.

Each probe takes ``root`` (``/``, or a folder with a recorded tree) and returns text. The formats:

* ``engines``: ``# ==> engine pid N <==``, then ``name: X``, ``unit: X``, ``container: X``, ``command: X`` with its keys
  masked, ``environment: read|not readable``, ``Environment NAME=value`` for the listed names alone, ``limit NAME: N``
  (-1: unlimited), ``shm_bytes: N``, ``shm_private: yes|no``, ``docker: {JSON of selected fields}``.
* ``engine_logs``: ``# ==> unit X <==`` and the telling lines of its journal of this boot: stages, errors, NCCL. Lines
  that echo arguments, environments or prompts are left out.
* ``p2p_caches``: ``# ==> PATH modified SECONDS <==`` and the file, for each P2P verdict that an engine stored.
* ``nccl_files``: ``# ==> PATH <==`` and the file, for each ``.nccl.conf`` of a user.
* ``nccl_topology`` and ``nccl_topology_file``: ``# ==> PATH <==`` and the XML that NCCL wrote, or is given.

Whole environments, keys and tokens are never read into the answer.
"""

from __future__ import annotations

import glob
import os
import re

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_probes import NotHereError

# Which engine a command line starts. Workers carry a title of their own (VLLM::Worker) and are left to their parent.
_ENGINES = (
    ("vllm", re.compile(r"\bvllm serve\b|\bvllm\.entrypoints\b")),
    ("sglang", re.compile(r"\bsglang\.launch_server\b|\bsglang serve\b")),
    ("llama_cpp", re.compile(r"\bllama-server\b|/peerlane-serve\b")),
)
# Every name that is kept of an environment, beside NCCL_*.
_VARIABLES = frozenset(
    (
        "CUDA_DEVICE_ORDER",
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_CACHE_ROOT",
        "VLLM_NCCL_SO_PATH",
        "VLLM_SKIP_P2P_CHECK",
        "VLLM_USE_NCCL_SYMM_MEM",
    )
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CRED")
# --max-num-batched-tokens and --tokenizer hold no secret; --api-key takes several values.
_SECRET_OPTION = re.compile(r"--?(?:[\w-]*[-_])?(?:api[-_]?keys?|token|password|secret)(?![\w-])", re.IGNORECASE)
_LIMITS = ("Max locked memory", "Max open files", "Max stack size")
_CONTAINER = re.compile(r"(?:docker[-/]|libpod-|cri-containerd-|/containers/|kubepods\S*/)([0-9a-f]{12,64})")
_UNIT = re.compile(r"/([\w@.\\:-]+\.service)(?:/|$)", re.MULTILINE)
# Of `docker inspect` these fields alone.
_DOCKER_FORMAT = (
    '{"Id":{{json .Id}},"Name":{{json .Name}},"IpcMode":{{json .HostConfig.IpcMode}},"PidMode":'
    '{{json .HostConfig.PidMode}},"Runtime":{{json .HostConfig.Runtime}},"ShmSize":{{json .HostConfig.ShmSize}},'
    '"CapAdd":{{json .HostConfig.CapAdd}},"Ulimits":{{json .HostConfig.Ulimits}}}'
)
_MOST_ENGINES = 32
_UNIT_NAMES = ("peerlane-model@*", "*vllm*", "*sglang*", "*llama-server*")
# Lines that a reader of a start needs: stages, complaints, what NCCL and the engine's all-reduce say.
_TELLING = re.compile(
    r"Error|ERROR|rror:|xception|ailed|ncorrect|NCCL|nccl==|allreduce|P2P access cache|shards:|Load weight"
    r"|Loading weights|Capturing|KV cache size|init engine|startup complete|Uvicorn running|listening on|fired up"
    r"|died|Watchdog|out of memory|not supported|in use|is used by|peerlane: | E "
)
# Engines echo their arguments, with API keys, and some their prompts.
_PRIVATE = re.compile(
    r"Namespace\(|non-default args|server_args|ServerArgs|args: |api[_-]?key|token=|TOKEN|environ|prompt"
    r"|Received request|[Aa]uthorization|password|secret",
    re.IGNORECASE,
)
_CACHE_NAME = "gpu_p2p_access_cache_for_*.json"
_CACHE_FOLDERS = ("root", "home/*", "var/cache/peerlane/*")
_CACHE_PLACES = (".cache/vllm", ".config/vllm", ".cache/sglang", "vllm", "sglang", ".cache/tvm-ffi/sglang")
_TOPOLOGYD = "var/run/nvidia-topologyd/virtualTopology.xml"
_SMALL = 64 * 1024
_LARGE = 1024 * 1024


# What a file must look like to be kept. Users choose these paths and may point them at any file of root's.
_CACHE = re.compile(r"\A\s*\{\s*(?:\"\d+->\d+\": (?:true|false),?\s*)+\}\s*\Z")
_TOPOLOGY = re.compile(r"\A\s*<system[ >]")


def engines(root: str) -> str:
    """Return each engine process. No block at all means: looked, and none runs."""
    found = _engine_processes(root)
    host = _shm(root, "self")
    return "".join(_engine(root, pid, name, words, host) for pid, name, words in found)


def _engine_processes(root: str) -> list[tuple[str, str, list[str]]]:
    """Return (pid, engine, arguments) of each engine whose parent is none, lowest pid first."""
    shown = {}
    for place in glob.glob(os.path.join(root, "proc", "[0-9]*")):
        words = _arguments(place)
        command = " ".join(words)
        name = next((name for name, pattern in _ENGINES if pattern.search(command)), "")
        # A shell that starts an engine has its command line too.
        if name and os.path.basename(words[0]) not in ("sh", "bash", "dash", "sudo", "timeout", "grep", "docker"):
            shown[os.path.basename(place)] = (name, words, _parent(place))
    tops = [(pid, name, words) for pid, (name, words, parent) in shown.items() if parent not in shown]
    return sorted(tops, key=lambda one: int(one[0]))[:_MOST_ENGINES]


def _arguments(place: str) -> list[str]:
    try:
        with open(os.path.join(place, "cmdline"), "rb") as stream:
            return [word for word in stream.read(_SMALL).decode("utf-8", "replace").split("\0") if word]
    except OSError:
        return []


def _parent(place: str) -> str:
    found = re.search(r"^PPid:\s*(\d+)", bounded.value(os.path.join(place, "status")) or "", re.MULTILINE)
    return found.group(1) if found else ""


def _engine(root: str, pid: str, name: str, words: list[str], host: tuple[int, int] | None) -> str:
    place = os.path.join(root, "proc", pid)
    groups = bounded.value(os.path.join(place, "cgroup")) or ""
    container = _CONTAINER.search(groups)
    unit = _UNIT.search(groups)
    lines = ["# ==> engine pid {0} <==".format(pid), "name: {0}".format(name)]
    lines.append("command: {0}".format(" ".join(_quoted(word) for word in masked(words))))
    if unit and not container:
        lines.append("unit: {0}".format(unit.group(1)))
    kept = _environment(place)
    lines.append("environment: {0}".format("not readable" if kept is None else "read"))
    lines += ["Environment {0}".format(pair) for pair in kept or []]
    lines += _process_limits(place)
    own = _shm(root, pid)
    if own is not None:
        lines.append("shm_bytes: {0}".format(own[0]))
        if host is not None:
            lines.append("shm_private: {0}".format("no" if own[1] == host[1] else "yes"))
    if container:
        identity = container.group(1)[:12]
        lines.append("container: {0}".format(identity))
        lines += _docker(identity) if root == "/" else []
    return "\n".join(lines) + "\n"


def masked(words: list[str]) -> list[str]:
    """Return arguments without the values of keys, tokens and passwords."""
    safe = []
    hide = False
    for word in words:
        option, equals, _ = word.partition("=")
        # `sh -c "... --api-key X"` has both in one word.
        if " " in word and _SECRET_OPTION.search(word):
            safe.append("***")
            continue
        if word.startswith("-"):
            hide = bool(_SECRET_OPTION.match(option))
            safe.append(option + "=***" if hide and equals else word)
        else:
            safe.append("***" if hide else word)
    return safe


def _quoted(word: str) -> str:
    return (
        word if re.match(r"[\w@%+=:,./*-]+$", word) else "'{0}'".format(word.replace("'", "'\\''").replace("\n", " "))
    )


def _environment(place: str) -> list[str] | None:
    try:
        with open(os.path.join(place, "environ"), "rb") as stream:
            pairs = stream.read(_LARGE).decode("utf-8", "replace").split("\0")
    except OSError:
        return None
    kept = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if equals and (name.startswith("NCCL_") or name in _VARIABLES) and not _SECRET.search(name):
            kept.append("{0}={1}".format(name, value.replace("\n", " ")))
    return sorted(kept)


def _process_limits(place: str) -> list[str]:
    text = bounded.value(os.path.join(place, "limits")) or ""
    found = []
    for name in _LIMITS:
        row = re.search(r"^{0}\s+(unlimited|\d+)\s".format(name), text, re.MULTILINE)
        if row:
            found.append("limit {0}: {1}".format(name, -1 if row.group(1) == "unlimited" else row.group(1)))
    return found


def _shm(root: str, pid: str) -> tuple[int, int] | None:
    """Return (bytes, device number) of the ``/dev/shm`` that a process sees."""
    place = os.path.join(root, "proc", pid, "root/dev/shm") if pid != "self" else os.path.join(root, "dev/shm")
    try:
        held = os.statvfs(place)
        return held.f_frsize * held.f_blocks, os.stat(place).st_dev
    except OSError:
        return None


def _docker(identity: str) -> list[str]:
    answer = bounded.run(["docker", "inspect", "--format", _DOCKER_FORMAT, identity], 10, _SMALL)
    return ["docker: {0}".format(answer["stdout"].strip())] if answer["rc"] == 0 and answer["stdout"].strip() else []


def engine_logs(root: str) -> str:
    """Return the telling lines of the journal of each engine's unit, also of one that ended."""
    units = {_unit(os.path.join(root, "proc", pid)) for pid, _, _ in _engine_processes(root)} - {""}
    shown = bounded.run(
        ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager", *_UNIT_NAMES], 20, _SMALL
    )
    units.update(row.split()[0] for row in shown["stdout"].splitlines() if row.split() and ".service" in row)
    parts = []
    for unit in sorted(units)[:_MOST_ENGINES]:
        journal = ["journalctl", "--unit", unit, "--boot", "--lines", "3000", "--no-pager", "--output", "cat"]
        said = bounded.run(journal, 20, 4 * _LARGE)["stdout"]
        rows = [row for row in said.splitlines() if _TELLING.search(row[:2000]) and not _PRIVATE.search(row)]
        if rows:
            parts.append("# ==> unit {0} <==\n{1}\n".format(unit, "\n".join(row[:1000] for row in rows[-1000:])))
    if not parts:
        raise NotHereError("no unit of an engine has a journal of this boot")
    return "".join(parts)


def _unit(place: str) -> str:
    found = _UNIT.search(bounded.value(os.path.join(place, "cgroup")) or "")
    return found.group(1) if found else ""


def p2p_caches(root: str) -> str:
    """Return the P2P verdicts that vLLM and SGLang stored, in homes and where running engines keep their caches."""
    folders = [os.path.join(root, home, place) for home in _CACHE_FOLDERS for place in _CACHE_PLACES]
    folders += _told_paths(root, "VLLM_CACHE_ROOT")
    parts = []
    for path in sorted({path for folder in folders for path in glob.glob(os.path.join(folder, _CACHE_NAME))}):
        text = bounded.value(path) or ""
        if _CACHE.match(text):
            parts.append("# ==> {0} modified {1} <==\n{2}\n".format(_shown(path), int(os.stat(path).st_mtime), text))
    if not parts:
        raise NotHereError("no stored P2P verdict was found")
    return "".join(parts)


def nccl_files(root: str) -> str:
    """Return the ``NCCL_`` lines of each user's ``.nccl.conf``."""
    parts = []
    for path in sorted(glob.glob(os.path.join(root, "home/*/.nccl.conf")) + [os.path.join(root, "root/.nccl.conf")]):
        text = str(bounded.read(path, _SMALL)["stdout"])
        rows = [row for row in text.split("\n") if row.lstrip().startswith("NCCL_")]
        if rows:
            parts.append("# ==> {0} <==\n{1}\n".format(_shown(path), "\n".join(rows)))
    if not parts:
        raise NotHereError("no user has a .nccl.conf")
    return "".join(parts)


def nccl_topology(root: str) -> str:
    """Return the topology that a running engine's NCCL wrote (``NCCL_TOPO_DUMP_FILE``)."""
    return _topologies(_told_paths(root, "NCCL_TOPO_DUMP_FILE"), "no engine writes NCCL_TOPO_DUMP_FILE")


def nccl_topology_file(root: str) -> str:
    """Return the topology that NCCL is given: by ``NCCL_TOPO_FILE`` of an engine, or by nvidia-topologyd."""
    paths = [*_told_paths(root, "NCCL_TOPO_FILE"), os.path.join(root, _TOPOLOGYD)]
    return _topologies(paths, "NCCL is given no topology file")


def _topologies(paths: list[str], none: str) -> str:
    for path in paths:
        text = str(bounded.read(path, _LARGE)["stdout"])
        if _TOPOLOGY.match(text):
            return "# ==> {0} <==\n{1}\n".format(_shown(path), text.rstrip("\n"))
    raise NotHereError(none)


def _told_paths(root: str, variable: str) -> list[str]:
    """Return the absolute paths that running engines have in a variable, as this machine reaches them."""
    found = []
    for pid, _, _ in _engine_processes(root):
        for pair in _environment(os.path.join(root, "proc", pid)) or []:
            name, _, value = pair.partition("=")
            if name == variable and value.startswith("/"):
                found.append(os.path.join(root, "proc", pid, "root", value.lstrip("/")))
    return found


def _shown(path: str) -> str:
    return re.sub(r"^.*/proc/\d+/root/", "/", path)


PROBES = {
    probe.__name__: probe for probe in (engines, engine_logs, p2p_caches, nccl_files, nccl_topology, nccl_topology_file)
}
