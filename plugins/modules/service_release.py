#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: place a release of a model service, switch to it, and clear old ones away."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: service_release
short_description: Place a release of a model service, switch to it, and clear old ones away
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Writes C(releases/<id>/) with C(release.json), C(args), C(env) and a link C(engine), beside its place, and renames
    it. A release that is there is never changed.
  - With O(state=current) the link C(current) is switched to it by rename, and C(previous) keeps the one before.
  - Does not restart the service.
options:
  root:
    description: Folder of the service.
    type: path
    required: true
  id:
    description: Name of the release. It should be made of its content.
    type: str
    required: true
  state:
    description: V(staged) only places the release. V(current) switches to it too.
    type: str
    choices: [staged, current]
    default: current
  args:
    description: Arguments of the engine, one a line. Needed where the release is not there yet.
    type: str
  env:
    description: Environment file of the service. It is readable by root only.
    type: str
  record:
    description: Content of C(release.json), without the time.
    type: dict
  engine_home:
    description: Folder of the engine.
    type: path
  keep:
    description: Releases that stay besides the current and the previous one.
    type: int
    default: 1
attributes:
  check_mode:
    description: Says whether a release would be placed or switched to.
    support: full
  diff_mode:
    description: Shows the arguments of the release before and after.
    support: full
"""

EXAMPLES = r"""
- name: Go back to the release before
  peerlane.gpu.service_release:
    root: /opt/peerlane/services/chat
    id: 3f0c1d2e4b5a
"""

RETURN = r"""
placed:
  description: Whether the release was written.
  returned: success
  type: bool
switched:
  description: Whether C(current) was switched.
  returned: success
  type: bool
before:
  description: Release that was current before; empty for none.
  returned: success
  type: str
removed:
  description: Old releases that were removed.
  returned: success
  type: list
  elements: str
"""

import json
import os
import shutil
import tempfile
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded

BUILDING = ".building-"


def link_name(path):
    """Return the release that a link names, or ""."""
    return os.path.basename(os.readlink(path)) if os.path.islink(path) else ""


def switch(root, link, name):
    """Point a link at a release by rename: there is no moment without it."""
    temporary = os.path.join(root, ".{0}-{1}".format(link, os.getpid()))
    os.symlink(os.path.join("releases", name), temporary)
    os.rename(temporary, os.path.join(root, link))


def place(releases, options):
    """Write a release beside its place and rename it."""
    building = tempfile.mkdtemp(prefix=BUILDING, dir=releases)
    os.chmod(building, 0o755)  # noqa: S103  the service user reads the arguments
    record = dict(options["record"], created_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    texts = (
        ("args", options["args"], 0o644),
        ("env", options["env"] or "", 0o600),
        ("release.json", json.dumps(record, indent=1, sort_keys=True) + "\n", 0o644),
    )
    for name, text, mode in texts:
        path = os.path.join(building, name)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(path, mode)
    os.symlink(options["engine_home"], os.path.join(building, "engine"))
    os.rename(building, os.path.join(releases, options["id"]))


def created_at(releases, name):
    """Return when a release was written, for the order of clearing away."""
    try:
        with open(os.path.join(releases, name, "release.json"), encoding="utf-8") as stream:
            return str(json.load(stream).get("created_at") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def to_remove(names_with_time, kept, keep):
    """Return the releases to remove: the oldest beyond ``keep``, never one of ``kept``."""
    others = sorted((time_text, name) for name, time_text in names_with_time.items() if name not in kept)
    return [name for _time, name in others[: max(0, len(others) - keep)]]


def clear_away(root, keep):
    """Remove old releases and what interrupted runs left; return the names of the releases."""
    releases = os.path.join(root, "releases")
    kept = {link_name(os.path.join(root, link)) for link in ("current", "previous")}
    names = {}
    for name in os.listdir(releases):
        if name.startswith(BUILDING):
            shutil.rmtree(os.path.join(releases, name))
        else:
            names[name] = created_at(releases, name)
    gone = to_remove(names, kept, keep)
    for name in gone:
        shutil.rmtree(os.path.join(releases, name))
    return gone


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "id": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["staged", "current"], "default": "current"},
            "args": {"type": "str"},
            "env": {"type": "str", "no_log": True},
            "record": {"type": "dict"},
            "engine_home": {"type": "path"},
            "keep": {"type": "int", "default": 1},
        },
        supports_check_mode=True,
    )
    options = module.params
    root, name = options["root"], options["id"]
    releases = os.path.join(root, "releases")
    before = link_name(os.path.join(root, "current"))
    there = os.path.isdir(os.path.join(releases, name))
    if not there and not (options["args"] and options["record"] and options["engine_home"]):
        module.fail_json(msg="{0} has no release {1}, and its content is not given".format(root, name))
    switched = options["state"] == "current" and before != name
    result = {
        "changed": switched or not there,
        "placed": not there,
        "switched": switched,
        "before": before,
        "removed": [],
    }
    new_args = options["args"] or bounded.read(os.path.join(releases, name, "args"), 65536)["stdout"]
    result["diff"] = {
        "before_header": "{0}/current ({1})".format(root, before or "none"),
        "after_header": "{0}/current ({1})".format(root, name),
        "before": bounded.read(os.path.join(root, "current", "args"), 65536)["stdout"] if before else "",
        "after": new_args,
    }
    if not result["changed"]:
        del result["diff"]
    if not result["changed"] or module.check_mode:
        module.exit_json(**result)
    os.umask(0o022)
    os.makedirs(releases, exist_ok=True)
    if not there:
        place(releases, options)
    if switched:
        if before:
            switch(root, "previous", before)
        switch(root, "current", name)
    result["removed"] = clear_away(root, options["keep"])
    module.exit_json(**result)


if __name__ == "__main__":
    main()
