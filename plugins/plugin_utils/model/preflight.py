"""What a host must have before anything on it is changed: one shell script asks, pure functions judge.

The script is plain POSIX sh, so that it also answers where Python is missing or too old. It prints lines
``key<TAB>value`` between two marks; a login banner around them does no harm. Every wait in it is bounded.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# Supported targets (design section 9): id in /etc/os-release -> VERSION_ID.
SUPPORTED: Mapping[str, tuple[str, ...]] = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04")}

# ansible-core 2.20 and later refuse a target below 3.9 (porting guide 2.20).
OLDEST_PYTHON = (3, 9)

# A floor, no estimate: below it apt or pip stop in the middle. What an engine or a model needs is checked by its role.
NEEDED_GIB: Mapping[str, float] = {"/opt": 1.0, "/var": 1.0}

# A signed apt list or a certificate is refused where the clock is wrong by minutes; logs are hard to join from 5 s on.
CLOCK_STOP_S = 300
CLOCK_WARN_S = 5

# One registry may take this long, and no more than this many are asked (side by side).
REGISTRY_TIMEOUT_S = 8
REGISTRY_COUNT = 8

# The whole script. A hung file system must not hang the run.
SCRIPT_TIMEOUT_S = 90

_BEGIN = "peerlane-preflight-begin"
_END = "peerlane-preflight-end"

State = Literal["ok", "warn", "stop", "unknown"]


@dataclass(frozen=True)
class Wanted:
    """What the host is to become: the inventory's variables that the checks need. Empty and None: not wanted.

    ``audit_only``: the host is only read, so what a change needs is not asked. ``engine`` with the CPU flags that it
    needs and the model formats that it reads. ``model_path`` is on the host, ``model_here`` on the controller,
    ``model_home`` where an earlier run put the model on the host.
    """

    audit_only: bool = False
    interpreter: str = ""
    engine: str = ""
    cpu_flags: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    port: int | None = None
    service: str = ""
    model_path: str = ""
    model_here: str = ""
    model_home: str = ""
    login: str = ""


@dataclass(frozen=True)
class Check:
    """One question with its answer. ``todo`` says what to do where the state is not ``ok``."""

    name: str
    state: State
    text: str
    todo: str = ""

    def line(self) -> str:
        """Return the one line that a user reads."""
        return f"{self.text}; {self.todo}" if self.todo and self.state != "ok" else self.text


@dataclass(frozen=True)
class Answers:
    """What the script printed, each key with its values in order. ``complete``: the end mark was seen."""

    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    complete: bool = False

    def first(self, key: str) -> str:
        """Return the first value of a key, or ""."""
        return self.values.get(key, ("",))[0]

    def every(self, key: str) -> tuple[str, ...]:
        """Return all values of a key."""
        return self.values.get(key, ())


# --- the question ---------------------------------------------------------------------------------------------------

_SCRIPT = r"""
LC_ALL=C; export LC_ALL
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin; export PATH
say() { printf '%s\t%s\n' "$1" "$2"; }
bounded() { if command -v timeout >/dev/null 2>&1; then timeout "$@"; else shift; "$@"; fi; }
process() { say "$1" "$2|$3|$(cat "/proc/$3/comm" 2>/dev/null)|$(sed -n 's/^0:.*://p' "/proc/$3/cgroup" 2>/dev/null)"; }
echo @BEGIN@
say now "$(date +%s)"
say uid "$(id -u)"
for p in @INTERPRETER@ python3 python3.14 python3.13 python3.12 python3.11 python3.10 python3.9; do
  v=$(bounded 10 "$p" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' </dev/null 2>/dev/null) &&
    say python "$(command -v "$p") $v"
done
[ -r /etc/os-release ] && (. /etc/os-release; say os_id "$ID"; say os_version "$VERSION_ID"; say os_name "$PRETTY_NAME")
say arch "$(uname -m)"
command -v dpkg >/dev/null 2>&1 && say dpkg_arch "$(dpkg --print-architecture)"
say cpu_flags "$(sed -n 's/^flags[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)"
say pid1 "$(cat /proc/1/comm 2>/dev/null)"
[ -d /run/systemd/system ] && say systemd yes
if [ -r /run/systemd/container ]; then say container "$(cat /run/systemd/container)"
elif [ -e /.dockerenv ]; then say container docker
elif [ -e /run/.containerenv ]; then say container podman; fi
[ -d /etc/pve/qemu-server ] && say proxmox yes
for d in /opt /var; do
  e=$d; [ -d "$e" ] || e=/
  say disk "$d|$(bounded 10 df -Pk "$e" 2>/dev/null | sed -n '2s/  */ /gp')"
done
for f in /var/lib/dpkg/lock-frontend /var/lib/dpkg/lock /var/lib/apt/lists/lock /var/cache/apt/archives/lock; do
  [ -e "$f" ] || continue
  i=$(stat -c %i "$f" 2>/dev/null) || continue
  q=$(sed -n "s/^[0-9]*: POSIX *ADVISORY *WRITE *\([0-9]*\) [^ ]*:$i [^>]*$/\1/p" /proc/locks 2>/dev/null | head -n 1)
  [ -n "$q" ] && process lock "$f" "$q"
done
if command -v dpkg-query >/dev/null 2>&1; then
  dpkg-query -W -f '${db:Status-Abbrev}|${Package}\n' 2>/dev/null | grep -e '^.[FHUWt]' -e '^..R' | head -n 8 |
    while read -r b; do say broken "$b"; done
fi
port=@PORT@
if [ -n "$port" ]; then
  h=$(printf '%04X' "$port")
  s=$(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep "^ *[0-9]*: [0-9A-F]*:$h [0-9A-F:]* 0A " | head -n 1)
  if [ -n "$s" ]; then
    # shellcheck disable=SC2086  # the words of the line are wanted apart
    set -- $s
    q=$(bounded 10 find /proc/[0-9]*/fd -lname "socket:\[${10}\]" 2>/dev/null | sed -n '1s/[^0-9]*\([0-9]*\).*/\1/p')
    if [ -n "$q" ]; then process listener "$port" "$q"; else say listener "$port|||"; fi
  fi
fi
model=@MODEL@
if [ -n "$model" ]; then
  if [ -f @HOME@/manifest.json ]; then say model_kind there
  elif [ -d "$model" ]; then
    say model_kind folder
    for f in "$model"/* "$model"/*/*.gguf; do [ -e "$f" ] && say model_file "${f##*/}"; done | head -n 60
  elif [ -f "$model" ]; then say model_kind file; say model_magic "$(head -c 4 "$model" | tr -cd '[:upper:]')"
  else say model_kind missing; fi
fi
archives() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
    sed -n 's/^ *deb  *\(\[[^]]*\]\)\{0,1\} *\([a-z]*:[^ ]*\)  *\([^ ]*\).*/\2 \3/p'
  for f in /etc/apt/sources.list.d/*.sources; do
    [ -r "$f" ] || continue
    { cat "$f"; echo; } | while IFS= read -r l; do
      case $l in
        URIs:*) u=${l#URIs:};; Suites:*) s=${l#Suites:};; Enabled:*[Nn]o*) u='';;
        '') for a in $u; do for b in $s; do echo "$a $b"; break; done; done; u=''; s='';;
      esac
    done
  done
}
ask() {
  case $1 in http://*|https://*) ;; *) exit 0;; esac
  case $2 in */) t=${1%/}/${2#/}InRelease;; *) t=${1%/}/dists/$2/InRelease;; esac
  o=$(bounded @SECONDS@ /usr/lib/apt/apt-helper -o APT::Sandbox::User=root -o Acquire::Retries=0 \
    -o Acquire::http::Timeout=5 -o Acquire::https::Timeout=5 download-file "$t" "$(mktemp -u -p "$w")" 2>&1)
  r=$?; say registry "$1|$r|$(printf '%s' "$o" | tr '\n' ' ' | tail -c 200)"
}
index() {
  u=$(sed -n 's/^ *index-url *= *//p' /etc/pip.conf /etc/xdg/pip/pip.conf 2>/dev/null | tail -n 1)
  u=${u:-https://pypi.org/simple}
  o=$(bounded @SECONDS@ python3 - "${u%/}/pip/" <<'PYTHON' 2>&1
import sys, urllib.error, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=5).close()
except urllib.error.HTTPError as error:
    if error.code >= 500:
        sys.exit("E: HTTP %d" % error.code)
except OSError as error:
    sys.exit("E: %s" % getattr(error, "reason", error))
PYTHON
  )
  r=$?; say registry "$(printf '%s' "$u" | sed 's,//[^/@]*@,//,')|$r|$(printf '%s' "$o" | tr '\n' ' ' | tail -c 200)"
}
if w=$(mktemp -d /run/peerlane-preflight.XXXXXX 2>/dev/null || mktemp -d); then
  {
    command -v python3 >/dev/null 2>&1 && index &
    [ -x /usr/lib/apt/apt-helper ] && archives | sort -u -k 1,1 | head -n @COUNT@ |
      { while read -r u s; do (ask "$u" "$s") & done; wait; } &
    wait
  }
  rm -rf "$w"
fi
echo @END@
"""


def script(wanted: Wanted) -> str:
    """Return the shell script that asks the host."""
    replaced = {
        "@BEGIN@": _BEGIN,
        "@END@": _END,
        "@INTERPRETER@": shlex.quote(wanted.interpreter) if wanted.interpreter else "",
        "@PORT@": str(wanted.port) if wanted.port is not None else "''",
        "@MODEL@": shlex.quote(wanted.model_path),
        "@HOME@": shlex.quote(wanted.model_home),
        "@SECONDS@": str(REGISTRY_TIMEOUT_S),
        "@COUNT@": str(REGISTRY_COUNT),
    }
    text = _SCRIPT.strip()
    for mark, value in replaced.items():
        text = text.replace(mark, value)
    return text + "\n"


def command(wanted: Wanted) -> str:
    """Return the shell command that runs the script with a limit on its time, where the host can limit one."""
    limit = f"$(command -v timeout >/dev/null 2>&1 && echo timeout {SCRIPT_TIMEOUT_S})"
    return f"{limit} /bin/sh -c {shlex.quote(script(wanted))}"


def parse(output: str) -> Answers:
    """Read what the script printed. Lines outside the marks and lines without a tab are somebody else's."""
    values: dict[str, list[str]] = {}
    inside = complete = False
    for line in output.splitlines():
        word = line.strip()
        if word == _BEGIN:
            inside = True
        elif word == _END:
            complete = inside
            inside = False
        elif inside and "\t" in line:
            key, _, value = line.partition("\t")
            values.setdefault(key, []).append(value.strip())
    return Answers({key: tuple(rows) for key, rows in values.items()}, complete)


# --- the verdict ----------------------------------------------------------------------------------------------------


def judge(answers: Answers, wanted: Wanted, offset_s: float | None = None) -> tuple[Check, ...]:
    """Return one check per question. ``offset_s``: the host's clock minus the controller's."""
    if not answers.values:
        return (Check("shell", "stop", "the host ran no /bin/sh command", "log in by hand and see what it prints"),)
    checks = [_root(answers, wanted), _python(answers, wanted), _clock(offset_s)]
    if not wanted.audit_only:
        checks += [
            _distribution(answers),
            _architecture(answers, wanted),
            _systemd(answers),
            *_disks(answers),
            _apt_lock(answers),
            _packages(answers),
            *_registries(answers),
        ]
    if wanted.port is not None:
        checks.append(_port(answers, wanted))
    if wanted.model_path:
        checks.append(_model(answers, wanted))
    if wanted.model_here:
        checks.append(model_on_controller(Path(wanted.model_here).expanduser(), wanted.formats))
    if not answers.complete:
        checks.append(
            Check("script", "unknown", "the host stopped answering in the middle", "run peerlane doctor again")
        )
    return tuple(checks)


def become_problem(message: str, login: str) -> Check | None:
    """Say what is wrong with sudo from Ansible's or sudo's own words, or None where it is something else."""
    low = message.lower()
    who = login or "the login user"
    if ("missing" in low and "password" in low) or "password is required" in low:
        todo = "run again with -K, set ansible_become_password (ansible-vault), or allow NOPASSWD in sudoers"
        return Check("sudo", "stop", f"sudo asks {who} for a password and none was given", todo)
    if ("incorrect" in low and "password" in low) or "sorry, try again" in low:
        return Check("sudo", "stop", f"sudo refused the password of {who}", "correct ansible_become_password, or -K")
    if "not in the sudoers" in low or "may not run sudo" in low or "not allowed to execute" in low:
        return Check("sudo", "stop", f"{who} may not use sudo", f"as root: add {who} to the group sudo")
    if "sudo: not found" in low or "sudo: command not found" in low or ("no such file" in low and "sudo" in low):
        return Check("sudo", "stop", "sudo is not installed", "as root: apt install sudo, or log in as root")
    if "privilege" in low and ("escalation" in low or "timed out" in low or "timeout" in low):
        return Check(
            "sudo", "stop", "sudo did not answer in time", "try: ssh HOST sudo -v; a sudo that asks a server may hang"
        )
    return None


def _root(answers: Answers, wanted: Wanted) -> Check:
    if answers.first("uid") == "0":
        return Check("sudo", "ok", "root by sudo" if wanted.login not in ("", "root") else "root")
    who = wanted.login or "the login user"
    return Check("sudo", "stop", f"{who} did not become root", "set ansible_become: true, and check sudo")


def _distribution(answers: Answers) -> Check:
    name = answers.first("os_name") or "an unnamed system (no /etc/os-release)"
    supported = ", ".join(f"{key.capitalize()} {' and '.join(versions)}" for key, versions in SUPPORTED.items())
    if answers.first("proxmox"):
        todo = "put it in the group hypervisors (audited, never provisioned) and provision its guests"
        return Check("distribution", "stop", f"{name} is a Proxmox node", todo)
    versions = SUPPORTED.get(answers.first("os_id"), ())
    if answers.first("os_version") in versions:
        return Check("distribution", "ok", name)
    return Check("distribution", "stop", f"{name} is not supported", f"supported are {supported}")


def _architecture(answers: Answers, wanted: Wanted) -> Check:
    machine, userland = answers.first("arch"), answers.first("dpkg_arch")
    if machine != "x86_64":
        kind = "a 32-bit host" if machine in ("i386", "i486", "i586", "i686", "armv7l", "armv6l") else "not supported"
        return Check("architecture", "stop", f"{machine or 'the architecture'} is {kind}", "Peerlane needs x86_64")
    if userland not in ("", "amd64"):
        text = f"a 32-bit userland ({userland}) runs on a 64-bit kernel"
        return Check("architecture", "stop", text, "install the amd64 system")
    flags = answers.first("cpu_flags").split()
    lacking = [flag for flag in wanted.cpu_flags if flags and flag not in flags]
    if lacking:
        text = f"the CPU shows no {', '.join(lacking)}, which the engine {wanted.engine} needs"
        return Check("architecture", "stop", text, "set the VM's CPU type to host, or use a newer CPU")
    return Check("architecture", "ok", machine)


def _python(answers: Answers, wanted: Wanted) -> Check:
    found = [(path, _version(text)) for path, _, text in (row.partition(" ") for row in answers.every("python"))]
    oldest = ".".join(map(str, OLDEST_PYTHON))
    other = next((path for path, version in found if version >= OLDEST_PYTHON), "")
    wish = wanted.interpreter
    if wish:
        match = next((one for one in found if one[0] == wish), None)
        if match is None:
            todo = f"set ansible_python_interpreter: {other}" if other else "as root: apt install python3"
            return Check("python", "stop", f"{wish} (ansible_python_interpreter) does not run", todo)
    elif found:
        match = found[0]
    else:
        return Check("python", "stop", "Python is not installed", "as root: apt install python3")
    path, version = match
    text = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        todo = f"set ansible_python_interpreter: {other}" if other else "use a newer distribution"
        return Check("python", "stop", f"{path} is Python {text}; {oldest} is the oldest that works", todo)
    return Check("python", "ok", f"Python {text} ({path})")


def _version(text: str) -> tuple[int, ...]:
    parts = text.split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else (0,)


def _systemd(answers: Answers) -> Check:
    container = answers.first("container")
    if answers.first("systemd") and answers.first("pid1") == "systemd":
        return Check("systemd", "ok", f"systemd, in a container ({container})" if container else "systemd")
    first = answers.first("pid1") or "nothing known"
    if container:
        todo = "use a container that boots an init (LXC, systemd-nspawn --boot), or a virtual machine"
        return Check("systemd", "stop", f"a {container} container without systemd (process 1 is {first})", todo)
    return Check("systemd", "stop", f"process 1 is {first}, not systemd", "a model service needs systemd")


def _disks(answers: Answers) -> list[Check]:
    checks = []
    for row in answers.every("disk"):
        folder, _, words = row.partition("|")
        cells = words.split(" ")
        name = f"space on {folder}"
        if len(cells) < 6 or not cells[3].isdigit():
            checks.append(Check(name, "unknown", f"df did not say how much is free on {folder}", f"run: df {folder}"))
            continue
        free_gib = int(cells[3]) / 1024**2
        text = f"{free_gib:.1f} GiB free on {folder}"
        if free_gib < NEEDED_GIB[folder]:
            text = f"only {text} (file system {cells[5]}); {NEEDED_GIB[folder]:.0f} GiB are needed"
            checks.append(Check(name, "stop", text, "make room or mount a larger disk there"))
        else:
            checks.append(Check(name, "ok", text))
    return checks


def _clock(offset_s: float | None) -> Check:
    if offset_s is None:
        return Check("clock", "unknown", "the host's clock was not read", "run: date")
    ahead = f"{abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine"
    if abs(offset_s) >= CLOCK_STOP_S:
        return Check(
            "clock", "stop", f"the clock is {ahead}", "run: timedatectl set-ntp true; signed lists are refused so"
        )
    if abs(offset_s) >= CLOCK_WARN_S:
        return Check("clock", "warn", f"the clock is {ahead}", "run: timedatectl set-ntp true")
    return Check("clock", "ok", "the clock agrees with this machine")


def lock_holder(answers: Answers) -> str:
    """Return who holds the apt or dpkg lock (``apt-get (pid 812)``), or "" where it is free."""
    row = answers.first("lock")
    if not row:
        return ""
    _, pid, name, unit = _cells(row, 4)
    return f"{name or 'a process'} (pid {pid}{_unit(unit)})"


def _cells(row: str, count: int) -> list[str]:
    """Split one value of the script; the last cell keeps what is left over."""
    cells = row.split("|", count - 1)
    return cells + [""] * (count - len(cells))


def _unit(cgroup: str) -> str:
    last = cgroup.rstrip("/").rpartition("/")[2]
    return f", {last}" if last.endswith((".service", ".scope")) else ""


def _apt_lock(answers: Answers) -> Check:
    holder = lock_holder(answers)
    if not holder:
        return Check("apt lock", "ok", "apt is free")
    place = answers.first("lock").partition("|")[0]
    return Check("apt lock", "stop", f"{holder} holds the apt lock {place}", "wait until it has ended, then run again")


def _packages(answers: Answers) -> Check:
    broken = [name for _, _, name in (row.partition("|") for row in answers.every("broken"))]
    if not broken:
        return Check("packages", "ok", "no package is half installed")
    todo = "as root: dpkg --configure -a, then apt -f install; or purge what is half installed"
    return Check("packages", "stop", f"half installed: {', '.join(broken)}", todo)


def _registries(answers: Answers) -> list[Check]:
    checks = []
    for row in sorted(answers.every("registry")):
        url, code, said = _cells(row, 3)
        if code == "0":
            checks.append(Check("registry", "ok", f"{url} answers"))
            continue
        why = "no answer in time" if code in ("124", "143") else _last_words(said) or f"apt-helper ended with {code}"
        todo = "packages from there cannot be installed; check network, proxy and /etc/apt/sources.list"
        checks.append(Check("registry", "warn", f"{url} does not answer ({why})", todo))
    return checks


def _last_words(said: str) -> str:
    _, mark, tail = said.rpartition("E: ")
    return (tail if mark else said).strip().rstrip(".")[:120]


def _port(answers: Answers, wanted: Wanted) -> Check:
    row = answers.first("listener")
    if not row:
        return Check("port", "ok", f"port {wanted.port} is free")
    _, pid, name, unit = _cells(row, 4)
    if wanted.service and f"peerlane-model@{wanted.service}.service" in unit:
        return Check("port", "ok", f"port {wanted.port} is served by {wanted.service} already")
    holder = f"{name} (pid {pid}{_unit(unit)})" if pid else "a process that cannot be seen"
    return Check("port", "stop", f"port {wanted.port} is taken by {holder}", "stop it, or set model_service_port")


def _model(answers: Answers, wanted: Wanted) -> Check:
    path, kind = wanted.model_path, answers.first("model_kind")
    if kind == "there":
        return Check("model", "ok", f"the model is in {wanted.model_home} already")
    if kind == "missing":
        return Check(
            "model", "stop", f"there is no {path} on the host", "correct model_weights_source, or copy it there"
        )
    return model_check(path, kind, answers.every("model_file"), answers.first("model_magic"), wanted.formats)


def model_check(path: str, kind: str, names: Sequence[str], magic: str, formats: Sequence[str]) -> Check:
    """Judge whether a path holds a model in one of these formats (empty: any): ``gguf``, ``safetensors``.

    A model is a GGUF file, a folder with one, or a folder with ``config.json`` and weights.
    """
    wanted = {"gguf": "a GGUF file", "safetensors": "a folder with config.json and *.safetensors"}
    todo = f"name {' or '.join(wanted[one] for one in formats or wanted if one in wanted)}"
    if kind == "file":
        found, lacks = ("gguf" if magic == "GGUF" else ""), "no GGUF mark"
    elif any(name.endswith(".gguf") for name in names):
        found, lacks = "gguf", ""
    else:
        weights = any(name.endswith((".safetensors", ".bin", ".pt")) for name in names)
        found = "safetensors" if weights and "config.json" in names else ""
        lacks = "no config.json" if weights else "no weights"
    if not found:
        return Check("model", "stop", f"{path} is no model ({lacks})", todo)
    if formats and found not in formats:
        return Check("model", "stop", f"{path} holds {found}, which the engine does not read", todo)
    return Check("model", "ok", f"{path} holds a model ({found})")


def model_on_controller(path: Path, formats: Sequence[str]) -> Check:
    """Judge a model that lies on the controller and is to be copied to the host."""
    try:
        if path.is_dir():
            names = [one.name for one in (*path.iterdir(), *path.glob("*/*.gguf"))]
            return model_check(str(path), "folder", names, "", formats)
        with path.open("rb") as stream:
            return model_check(str(path), "file", (), stream.read(4).decode("ascii", errors="replace"), formats)
    except OSError as error:
        todo = "correct model_weights_source"
        return Check("model", "stop", f"{path} on this machine cannot be read: {error.strerror}", todo)


def clock_offset_s(answers: Answers, started: float, ended: float) -> float | None:
    """Return the host's clock minus the controller's in seconds: 0.0 where the answer fits between the two stamps."""
    said = answers.first("now")
    if not said.isdigit():
        return None
    now = float(said)
    # ``date +%s`` cuts the fraction off, so the true time lies within the next second.
    return max(0.0, now - ended) + min(0.0, now + 1 - started)


def facts(answers: Answers, checks: Sequence[Check], offset_s: float | None) -> dict[str, Any]:
    """Return the fact ``preflight``: plain types, what was read and what was judged."""
    rows = [row.partition(" ") for row in answers.every("python")]
    return {
        "fit": not stops(checks),
        "os": {key: answers.first(f"os_{key}") for key in ("id", "version", "name")},
        "arch": answers.first("arch"),
        "container": answers.first("container"),
        "pythons": {path: version for path, _, version in rows},
        "clock_offset_s": None if offset_s is None else round(offset_s, 1),
        "checks": [asdict(one) for one in checks],
    }


def stops(checks: Sequence[Check]) -> list[Check]:
    """Return the checks that must stop a change."""
    return [one for one in checks if one.state == "stop"]
