#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: build the immutable venv of an inference engine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: engine_venv
short_description: Build the immutable venv of an inference engine
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Builds a virtual environment from a lock of all packages, beside its place, tries it, and renames it into place.
  - A venv that is there and complete is never changed. What an interrupted run left behind is removed.
  - Where the venv has to be built and O(packages) are missing, nothing is built and RV(missing_packages) names them.
    Install them and call the module again.
options:
  home:
    description: Folder of the venv. Its name should tell engine, version and build apart from others.
    type: path
    required: true
  engine:
    description: Name of the engine, for the record.
    type: str
    required: true
  version:
    description: Version of the engine, for the record.
    type: str
    required: true
  import_name:
    description: Python module that must be importable in the finished venv.
    type: str
    required: true
  lock:
    description: Text of the requirements file with all packages, each with C(==) and hashes.
    type: str
    required: true
  launcher:
    description: Text of the Python script that serves a release. It becomes C(bin/peerlane-serve).
    type: str
    required: true
  python:
    description: Python of the host that the venv is made from.
    type: path
    default: /usr/bin/python3
  oldest_python:
    description: Oldest Python that the engine runs on.
    type: str
    default: "3.9"
  installer:
    description: Program that installs the packages. V(auto) takes C(uv) where it is found.
    type: str
    choices: [auto, uv, pip]
    default: auto
  wheelhouse:
    description: Folder on the host with all wheels. No package index is asked then.
    type: path
  packages:
    description: Packages of the distribution that building and running need.
    type: list
    elements: str
    default: []
  cpu_flags:
    description: CPU features that the engine needs, as C(/proc/cpuinfo) of an x86 CPU names them.
    type: list
    elements: str
    default: []
  disk_mb:
    description: Megabytes (1e6 bytes) that the venv needs.
    type: int
    default: 0
  timeout_s:
    description: Seconds after which an installation is given up.
    type: int
    default: 1800
attributes:
  check_mode:
    description: Says whether the venv would be built.
    support: full
  diff_mode:
    description: Shows the lock of a venv that is built.
    support: full
"""

EXAMPLES = r"""
- name: Build a venv
  peerlane.gpu.engine_venv:
    home: /opt/peerlane/engines/llama_cpp-2026.10.11549+1a2b3c4d
    engine: llama_cpp
    version: 2026.10.11549
    import_name: xllamacpp
    lock: "{{ lookup('ansible.builtin.file', 'llama_cpp.lock') }}"
    launcher: "{{ lookup('ansible.builtin.file', 'serve.py') }}"
"""

RETURN = r"""
home:
  description: Folder of the venv.
  returned: success
  type: str
record:
  description: What C(engine.json) in the venv says. Empty in check mode where the venv would be built.
  returned: success
  type: dict
installer:
  description: Program that installed the packages; empty where the venv was there.
  returned: success
  type: str
removed:
  description: Left-overs of interrupted builds that were removed.
  returned: success
  type: list
  elements: str
missing_packages:
  description: Packages of O(packages) that are not installed; empty where the venv is complete.
  returned: success
  type: list
  elements: str
build_s:
  description: Seconds that the build took.
  returned: success
  type: float
"""

import fcntl
import glob
import json
import os
import shutil
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded, engine_venv

VERSION_CODE = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def read_record(home):
    """Return engine.json of a finished venv, or {}."""
    try:
        with open(os.path.join(home, engine_venv.RECORD), encoding="utf-8") as stream:
            record = json.load(stream)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("schema") == engine_venv.RECORD_SCHEMA else {}


def python_version(module, python):
    """Return ``3.13.5``, or "" where this Python can't be run."""
    if not os.access(python, os.X_OK):
        return ""
    code, out, _err = module.run_command([python, "-c", VERSION_CODE])
    return out.strip() if code == 0 else ""


def refuse_python(module, python, version):
    """Fail with one line where this Python can't carry the engine or can't be run by another user."""
    if not version:
        module.fail_json(msg="{0} can't be run: install python3, or set another Python".format(python))
    if engine_venv.older(tuple(int(part) for part in version.split(".")[:2]), module.params["oldest_python"]):
        module.fail_json(
            msg="{0} is Python {1}, {2} needs {3} or newer: set another Python of the host".format(
                python, version, module.params["engine"], module.params["oldest_python"]
            )
        )
    folder = os.path.dirname(os.path.realpath(python))
    while folder != "/":
        if not os.stat(folder).st_mode & 0o001:
            module.fail_json(
                msg="{0} lies below {1}, which other users can't enter, so the service user could not run it: "
                "use the system's Python".format(os.path.realpath(python), folder)
            )
        folder = os.path.dirname(folder)


def refuse_cpu(module):
    """Fail with one line where the CPU lacks a feature that the engine needs."""
    cpu = bounded.value("/proc/cpuinfo") or ""
    lacking = engine_venv.missing_flags(cpu, module.params["cpu_flags"])
    if lacking:
        module.fail_json(
            msg="{0} needs the CPU features {1}, which this CPU does not have; "
            "in a virtual machine set the CPU type to host".format(module.params["engine"], ", ".join(lacking))
        )


def missing_packages(module):
    """Return which of the packages dpkg does not have installed."""
    wanted = module.params["packages"]
    if not wanted:
        return []
    query = [
        module.get_bin_path("dpkg-query", required=True),
        "--show",
        "--showformat",
        "${Package} ${db:Status-Status}\\n",
    ]
    # A package that is not known ends with 1, and is missing.
    _code, out, _err = module.run_command(query + wanted)
    installed = {line.split()[0] for line in out.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in installed]


class Builder:
    """One build, in a folder beside the venv's last place."""

    def __init__(self, module):
        self.module = module
        self.options = module.params
        self.home = module.params["home"]
        self.root = os.path.dirname(self.home)
        self.uv = module.get_bin_path("uv") if module.params["installer"] in ("auto", "uv") else None
        if module.params["installer"] == "uv" and not self.uv:
            module.fail_json(msg="uv is not on the PATH of this host: install it, or use the installer pip")
        self.timeout = [module.get_bin_path("timeout", required=True), str(module.params["timeout_s"])]

    @property
    def installer(self):
        """Return the name of the program that installs."""
        return "uv" if self.uv else "pip"

    def clean(self):
        """Remove what interrupted builds left. The lock is held: nobody builds there now."""
        left = sorted(glob.glob(os.path.join(glob.escape(self.root), engine_venv.BUILDING + "*")))
        if os.path.isdir(self.home) and not read_record(self.home):
            left.append(self.home)
        for path in left:
            shutil.rmtree(path)
        return left

    def build(self, version):
        """Build, try, and rename into place. Returns the record."""
        building = tempfile.mkdtemp(prefix=engine_venv.BUILDING, dir=self.root)
        os.chmod(building, 0o755)  # noqa: S103  the service user reads it
        try:
            self.make_venv(building)
            self.install(building)
            self.try_import(building)
            record = self.finish(building, version)
            old = None
            if os.path.isdir(self.home):
                old = building + "-old"
                os.rename(self.home, old)
            os.rename(building, self.home)
            if old:
                shutil.rmtree(old)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return record

    def make_venv(self, building):
        """Make the empty venv."""
        if self.uv:
            command = [self.uv, "venv", "--quiet", "--no-project", "--allow-existing"]
            command += ["--python", self.options["python"], building]
        else:
            command = [self.options["python"], "-m", "venv", building]
        code, out, err = self.module.run_command(self.timeout + command)
        if code != 0:
            text = out + err
            cause = "python3-venv is missing" if "ensurepip" in text else engine_venv.install_cause(text)
            self.module.fail_json(msg="the venv can't be made with {0}: {1}".format(self.options["python"], cause))

    def install(self, building):
        """Install every package of the lock, checked by hash, as wheels only."""
        lock = os.path.join(building, engine_venv.LOCK)
        with open(lock, "w", encoding="utf-8") as stream:
            stream.write(self.options["lock"])
        python = os.path.join(building, "bin", "python")
        if self.uv:
            command = [self.uv, "pip", "install", "--quiet", "--python", python, "--compile-bytecode"]
        else:
            command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        command += ["--require-hashes", "--only-binary", ":all:", "--requirement", lock]
        if self.options["wheelhouse"]:
            command += ["--no-index", "--find-links", self.options["wheelhouse"]]
        code, out, err = self.module.run_command(self.timeout + command)
        if code == 124:
            cause = "no end after {0} s".format(self.options["timeout_s"])
        else:
            cause = engine_venv.install_cause(out + "\n" + err)
            if self.options["wheelhouse"]:
                cause = cause.replace("the package index", "the wheelhouse " + self.options["wheelhouse"])
        if code != 0:
            self.module.fail_json(
                msg="{0} {1} can't be installed by {2}: {3}".format(
                    self.options["engine"], self.options["version"], self.installer, cause
                ),
                stdout=out[-20000:],
                stderr=err[-20000:],
            )

    def try_import(self, building):
        """Import the engine in its venv: a wheel for another CPU dies here and not in the service."""
        python = os.path.join(building, "bin", "python")
        command = [python, "-c", "import " + self.options["import_name"]]
        code, _out, err = self.module.run_command(self.timeout + command)
        if code in (-4, 132):
            self.module.fail_json(
                msg="{0} {1} ends with an illegal instruction on this CPU".format(
                    self.options["engine"], self.options["version"]
                )
            )
        if code != 0:
            lines = err.strip().splitlines() or ["no message"]
            self.module.fail_json(
                msg="{0} is installed but can't be imported: {1}".format(self.options["engine"], lines[-1]), stderr=err
            )

    def finish(self, building, version):
        """Write the launcher and the record, with the paths that hold after the rename."""
        launcher = os.path.join(building, engine_venv.LAUNCHER)
        with open(launcher, "w", encoding="utf-8") as stream:
            stream.write("#!{0}/bin/python\n".format(self.home) + self.options["launcher"])
        os.chmod(launcher, 0o755)  # noqa: S103  the service user runs it
        scripts = [path for path in glob.glob(os.path.join(building, "bin", "*")) if not os.path.islink(path)]
        for path in scripts + [os.path.join(building, "pyvenv.cfg")]:
            with open(path, "rb") as stream:
                before = stream.read()
            after = engine_venv.relocated(before, building, self.home)
            if after != before:
                with open(path, "wb") as stream:
                    stream.write(after)
        record = {
            "schema": engine_venv.RECORD_SCHEMA,
            "engine": self.options["engine"],
            "version": self.options["version"],
            "python": version,
            "executable": "bin/python",
            "launcher": engine_venv.LAUNCHER,
            "lock": engine_venv.LOCK,
            "installer": self.installer,
            "built_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        with open(os.path.join(building, engine_venv.RECORD), "w", encoding="utf-8") as stream:
            json.dump(record, stream, indent=1, sort_keys=True)
            stream.write("\n")
        return record


def require_space(module, root):
    """Fail with one line where the disk is too small."""
    place = root
    while not os.path.isdir(place):
        place = os.path.dirname(place)
    free_mb = shutil.disk_usage(place).free // 10**6
    if free_mb < module.params["disk_mb"]:
        module.fail_json(
            msg="not enough space below {0}: {1} needs {2} MB, {3} MB are free".format(
                place, module.params["engine"], module.params["disk_mb"], free_mb
            )
        )


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "home": {"type": "path", "required": True},
            "engine": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "import_name": {"type": "str", "required": True},
            "lock": {"type": "str", "required": True},
            "launcher": {"type": "str", "required": True},
            "python": {"type": "path", "default": "/usr/bin/python3"},
            "oldest_python": {"type": "str", "default": "3.9"},
            "installer": {"type": "str", "choices": ["auto", "uv", "pip"], "default": "auto"},
            "wheelhouse": {"type": "path"},
            "packages": {"type": "list", "elements": "str", "default": []},
            "cpu_flags": {"type": "list", "elements": "str", "default": []},
            "disk_mb": {"type": "int", "default": 0},
            "timeout_s": {"type": "int", "default": 1800},
        },
        supports_check_mode=True,
    )
    home = module.params["home"]
    record = read_record(home)
    works = (
        bool(record)
        and python_version(module, os.path.join(home, "bin", "python")).rsplit(".", 1)[0]
        == str(record.get("python", "")).rsplit(".", 1)[0]
    )
    result = {"home": home, "record": record, "installer": "", "removed": [], "build_s": 0.0, "changed": False}
    result["missing_packages"] = []
    if works:
        module.exit_json(**result)
    refuse_cpu(module)
    result["missing_packages"] = missing_packages(module)
    if result["missing_packages"] and not module.check_mode:
        module.exit_json(**result)
    python = module.params["python"]
    version = python_version(module, python)
    refuse_python(module, python, version)
    require_space(module, os.path.dirname(home))
    wheelhouse = module.params["wheelhouse"]
    if wheelhouse and not os.path.isdir(wheelhouse):
        module.fail_json(msg="the wheelhouse {0} is no folder on this host".format(wheelhouse))
    result.update(changed=True, record={})
    result["diff"] = {
        "before": "",
        "after": module.params["lock"],
        "after_header": os.path.join(home, engine_venv.LOCK),
    }
    if module.check_mode:
        module.exit_json(**result)
    os.umask(0o022)
    os.makedirs(os.path.dirname(home), exist_ok=True)
    with open(os.path.join(os.path.dirname(home), ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            module.fail_json(msg="another run is building an engine on this host right now; wait for it")
        builder = Builder(module)
        started = time.monotonic()
        result["removed"] = builder.clean()
        result["record"] = builder.build(version)
        result["installer"] = builder.installer
        result["build_s"] = round(time.monotonic() - started, 1)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
