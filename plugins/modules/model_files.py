#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: bring a model's files to a host, verified, with a manifest."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_files
short_description: Bring a model's files to a host, verified, with a manifest
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Makes a folder with the files of one model at one revision and a C(manifest.json) with their sizes and SHA-256.
  - Files come from a folder on the same host, or from a model hub over HTTP. What is there and right is left alone; a
    file that is missing, truncated or altered is named and brought again. Partial files are resumed.
  - A folder whose content differs from its source at the same revision is not overwritten, because a revision is
    immutable. Give the new content a new revision.
  - Runs as often as needed in steps of O(budget_s) and shows its progress in between.
options:
  path:
    description: Folder of the model at this revision. It belongs to this module alone.
    type: path
    required: true
  name:
    description: Name of the model, for the manifest.
    type: str
    required: true
  revision:
    description: Revision of the model. For a hub a branch, a tag or a commit.
    type: str
    required: true
  source:
    description:
      - A folder (or one GGUF file) on the host, or C(hf://organisation/name).
      - Without a source the folder is only compared with its manifest and with O(expected).
    type: str
  expected:
    description:
      - The files that the folder must hold, from P(peerlane.gpu.model_listing#lookup), where O(source) can't be seen
        from the host.
    type: list
    elements: dict
    suboptions:
      path:
        description: Relative path.
        type: str
        required: true
      size:
        description: Size in bytes.
        type: int
        required: true
      sha256:
        description: SHA-256 in hex.
        type: str
        required: true
      full:
        description: Where the file lies on the controller. Not used on the host.
        type: path
  method:
    description:
      - How files of a local O(source) come over. V(copy) shares blocks where the file system can.
      - V(move) takes the files away from their source.
    type: str
    choices: [copy, hardlink, move]
    default: copy
  verify:
    description:
      - V(quick) compares sizes and times with the manifest, and hashes only what looks touched. V(full) hashes all.
    type: str
    choices: [quick, full]
    default: quick
  endpoint:
    description: Address of the model hub.
    type: str
    default: https://huggingface.co
  token:
    description: Access token of the hub. It is sent to the endpoint's own host only.
    type: str
  connections:
    description: Files that are downloaded at the same time.
    type: int
    default: 4
  reserve_mb:
    description: Megabytes (1e6 bytes) of disk that stay free.
    type: int
    default: 1000
  budget_s:
    description: Seconds after which one step of the module returns with what it has.
    type: int
    default: 20
attributes:
  check_mode:
    description: Says which files would be brought, and changes nothing.
    support: full
  diff_mode:
    description: Shows the list of files with sizes before and after.
    support: full
"""

EXAMPLES = r"""
- name: Fetch a model at a commit
  peerlane.gpu.model_files:
    path: /opt/peerlane/models/small-model@1f3c2b9
    name: small-model
    revision: 1f3c2b9
    source: hf://example/small-model

- name: Check every byte of a model that is there
  peerlane.gpu.model_files:
    path: /opt/peerlane/models/small-model@1f3c2b9
    name: small-model
    revision: 1f3c2b9
    verify: full
"""

RETURN = r"""
path:
  description: The folder.
  returned: always
  type: str
complete:
  description: Whether the folder holds the whole model, verified. In check mode, whether it did already.
  returned: always
  type: bool
brought:
  description: Relative paths of the files that were brought, or in check mode would be.
  returned: always
  type: list
  elements: str
damaged:
  description: What was wrong with files that the manifest names, by relative path.
  returned: always
  type: dict
  sample: {model.safetensors: 'is truncated: 1000 of 464408 bytes'}
total_bytes:
  description: Size of the whole model in bytes.
  returned: always
  type: int
done_bytes:
  description: How many of these bytes are on the host.
  returned: always
  type: int
format:
  description: V(gguf) or V(safetensors).
  returned: always
  type: str
"""

import fcntl
import os
import time
from concurrent.futures import ThreadPoolExecutor

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import model_files
from ansible_collections.peerlane.gpu.plugins.module_utils.model_files import PART, ModelError, ModelFile
from ansible_collections.peerlane.gpu.plugins.module_utils.model_hub import Hub

HUB = "hf://"


class Work:
    """One call: what is wanted, what is there, what is missing."""

    def __init__(self, module):
        self.module = module
        self.options = module.params
        self.path = module.params["path"].rstrip("/")
        self.deadline = time.monotonic() + module.params["budget_s"]
        self.hub = None
        self.about = {key: module.params[key] for key in ("name", "revision")}
        self.about["source"] = "controller" if module.params["expected"] else module.params["source"]
        self.manifest = model_files.read_manifest(self.path)
        self.damaged = {}
        self.brought = []

    def keep_going(self):
        """Whether there is time left in this call."""
        return time.monotonic() < self.deadline

    def wanted(self):
        """Return the files that the folder must hold."""
        source = self.options["source"]
        if self.options["expected"]:
            files = [ModelFile(row["path"], row["size"], row["sha256"]) for row in self.options["expected"]]
        elif source and source.startswith(HUB):
            if self._settled_by_manifest():
                return self._rows_of_manifest()
            self.hub = Hub(
                self.options["endpoint"], source[len(HUB) :], self.about["revision"], self.options["token"] or ""
            )
            self.about["commit"], files = self.hub.listing()
        elif source:
            files = model_files.list_folder(source)
        else:
            return self._rows_of_manifest()
        unsafe = [one.path for one in files if not model_files.safe_path(one.path)]
        if unsafe:
            raise ModelError("{0!r} would leave the folder {1}".format(unsafe[0], self.path))
        if not model_files.model_format(one.path for one in files):
            raise ModelError("{0} is no model: neither *.gguf nor config.json with *.safetensors".format(source))
        return files

    def _settled_by_manifest(self):
        """A hub is not asked again for a revision whose manifest is there: revisions do not change."""
        same = all(self.manifest.get(key) == self.about[key] for key in ("source", "revision"))
        if same and self.manifest.get("commit"):
            self.about["commit"] = self.manifest["commit"]
            return True
        return False

    def _rows_of_manifest(self):
        return [ModelFile(row["path"], row["size"], row["sha256"]) for row in self.manifest.get("files", [])]

    def missing(self, files):
        """Return the files to bring. Raises ModelError where the source has other content at the same revision."""
        self.damaged = model_files.damage(self.path, self.manifest, self.options["verify"] == "full")
        known = {row["path"]: row for row in self.manifest.get("files", [])}
        if known:
            self._refuse_other_content(files, known)
        return [one for one in files if one.path not in known or one.path in self.damaged]

    def _refuse_other_content(self, files, known):
        other = sorted({one.path for one in files} ^ set(known))
        for one in files:
            row = known.get(one.path)
            if row is None:
                continue
            if self._differs(one, row):
                other.append(one.path)
        if other:
            raise ModelError(
                "{0} holds {1} at revision {2}, but {3} has another {4}: a revision is immutable, "
                "give the new content a new revision".format(
                    self.path, self.about["name"], self.about["revision"], self.about["source"], other[0]
                )
            )

    def _differs(self, one, row):
        """Whether a source has other content than the manifest says; a local source is only hashed when it is newer."""
        if one.size != row["size"]:
            return True
        if one.sha256:
            return one.sha256 != row["sha256"]
        local = self._local(one)
        newer = bool(local) and os.stat(local).st_mtime_ns > row["mtime_ns"]
        return newer and model_files.sha256_of(local) != row["sha256"]

    def _local(self, one):
        source = self.options["source"]
        if not source or source.startswith(HUB):
            return ""
        return os.path.join(source, one.path) if os.path.isdir(source) else source

    def require_space(self, missing):
        """Raise ModelError where the disk can't take the missing files."""
        complaint = model_files.space_complaint(
            self.path, model_files.needed_bytes(self.path, missing), self.options["reserve_mb"] * 10**6
        )
        if complaint:
            raise ModelError(complaint)

    def bring(self, files, missing):
        """Bring what is missing, as far as the time of this call goes. Return whether all is there."""
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        hashes = {row["path"]: row["sha256"] for row in self.manifest.get("files", [])}
        hashes.update(self._placed_before(missing))
        todo = [one for one in missing if one.path not in hashes or one.path in self.damaged]
        if (self.options["source"] or "").startswith(HUB):
            finished = self._download(todo, hashes)
        else:
            finished = self._copy(todo, hashes)
        if not finished:
            return False
        model_files.remove_strangers(self.path, [one.path for one in files])
        manifest = model_files.make_manifest(self.path, self.about, {one.path: hashes[one.path] for one in files})
        model_files.write_manifest(self.path, manifest)
        self.manifest = manifest
        return True

    def _placed_before(self, missing):
        """Hash files that an earlier, unfinished run already put in place."""
        found = {}
        for one in missing:
            final = os.path.join(self.path, one.path)
            if one.path in self.damaged or not os.path.isfile(final) or os.path.getsize(final) != one.size:
                continue
            digest = model_files.sha256_of(final)
            if (one.sha256 or digest) == digest and (
                not one.git_sha1 or one.sha256 or model_files.git_sha1_of(final) == one.git_sha1
            ):
                found[one.path] = digest
        return found

    def _copy(self, todo, hashes):
        for one in todo:
            source = self._local(one)
            if not source:
                raise ModelError("{0} is not whole and no source is given to get {1} from".format(self.path, one.path))
            if not self.keep_going():
                return False
            if not model_files.copy_file(source, self.path, one, self.options["method"], self.keep_going):
                return False
            hashes[one.path] = model_files.place_file(self.path, one)
            self.brought.append(one.path)
        return True

    def _download(self, todo, hashes):
        if self.hub is None:
            source = self.options["source"]
            self.hub = Hub(
                self.options["endpoint"], source[len(HUB) :], self.about["revision"], self.options["token"] or ""
            )

        def one_file(one):
            if not self.keep_going() or not self.hub.fetch(self.path, self.about["commit"], one, self.keep_going):
                return False
            hashes[one.path] = model_files.place_file(self.path, one)
            self.brought.append(one.path)
            return True

        with ThreadPoolExecutor(max_workers=max(1, self.options["connections"])) as pool:
            return all(list(pool.map(one_file, todo)))

    def done_bytes(self, files):
        """Return how many bytes of these files are on the host, whole or partial."""
        total = 0
        for one in files:
            final = os.path.join(self.path, one.path)
            for place in (final, final + PART):
                if os.path.isfile(place):
                    total += min(os.path.getsize(place), one.size)
                    break
        return total


def locked(path):
    """Return a lock that only one run at a time can hold for this folder, or None where another one holds it."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    lock = open(os.path.join(os.path.dirname(path), "." + os.path.basename(path) + ".lock"), "w")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None
    return lock


def listing_text(rows):
    """Return the files of a manifest as text for a difference."""
    return "".join("{0} {1} {2}\n".format(row["path"], row["size"], row["sha256"][:16]) for row in rows)


def main():
    """Run the module."""
    os.umask(0o022)  # the service user reads what root writes here
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "revision": {"type": "str", "required": True},
            "source": {"type": "str"},
            "expected": {
                "type": "list",
                "elements": "dict",
                "options": {
                    "path": {"type": "str", "required": True},
                    "size": {"type": "int", "required": True},
                    "sha256": {"type": "str", "required": True},
                    "full": {"type": "path"},
                },
            },
            "method": {"type": "str", "choices": ["copy", "hardlink", "move"], "default": "copy"},
            "verify": {"type": "str", "choices": ["quick", "full"], "default": "quick"},
            "endpoint": {"type": "str", "default": "https://huggingface.co"},
            "token": {"type": "str", "no_log": True},
            "connections": {"type": "int", "default": 4},
            "reserve_mb": {"type": "int", "default": 1000},
            "budget_s": {"type": "int", "default": 20},
        },
        supports_check_mode=True,
    )
    if not module.params["endpoint"].startswith(("https://", "http://")):
        module.fail_json(msg="endpoint {0!r} is no http(s) address".format(module.params["endpoint"]))
    work = Work(module)
    try:
        run(module, work)
    except ModelError as error:
        module.fail_json(msg=str(error), path=work.path, damaged=work.damaged, brought=sorted(work.brought))
    except OSError as error:
        module.fail_json(msg="{0}: {1}".format(error.filename or work.path, error.strerror), path=work.path)


def run(module, work):
    """Compare, and bring what is missing unless this is only a check."""
    before = work.manifest.get("files", [])
    files = work.wanted()
    missing = work.missing(files)
    result = {
        "path": work.path,
        "changed": bool(missing),
        "complete": bool(files) and not missing,
        "brought": [one.path for one in missing],
        "damaged": work.damaged,
        "total_bytes": sum(one.size for one in files),
        "done_bytes": work.done_bytes(files),
        "format": model_files.model_format(one.path for one in files),
    }
    rows = [{"path": one.path, "size": one.size, "sha256": one.sha256 or "(not known yet)"} for one in files]
    only_asked = not work.options["source"]
    if work.options["method"] == "copy":
        work.require_space(missing)
    for path in sorted(work.damaged):
        module.warn("{0}: {1} {2}".format(work.path, path, work.damaged[path]))
    if missing and not module.check_mode and not only_asked:
        lock = locked(work.path)
        if lock is None:
            raise ModelError("another run is bringing {0} right now; wait for it".format(work.path))
        result["complete"] = work.bring(files, missing)
        result["brought"] = sorted(work.brought)
        result["done_bytes"] = work.done_bytes(files)
        rows = work.manifest.get("files", rows)
    if only_asked:
        result["changed"] = False
    if result["changed"]:
        result["diff"] = {
            "before_header": work.path,
            "after_header": work.path,
            "before": listing_text(before),
            "after": listing_text(rows),
        }
    module.exit_json(**result)


if __name__ == "__main__":
    main()
