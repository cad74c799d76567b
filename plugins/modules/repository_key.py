#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: install the key of an apt repository, but only the one that was asked for."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: repository_key
short_description: Install the key of an apt repository after checking its fingerprint
description:
  - Reads a key from a URL or from a file on the host, compares its fingerprint with the expected one, and writes it in
    binary form where C(Signed-By) of an apt source can name it.
  - Needs no C(gpg) on the host.
  - A file that holds further keys is refused, since each of them could sign the repository.
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
options:
  url:
    description:
      - Where the key is, C(https://), C(http://) or C(file://), or an absolute path on the host.
    type: str
    required: true
  fingerprint:
    description:
      - The 40 hexadecimal digits of the key's fingerprint. Blanks are ignored.
    type: str
    required: true
  dest:
    description:
      - The keyring file to write.
    type: path
    required: true
  timeout_s:
    description:
      - Seconds to wait for the server.
    type: int
    default: 30
attributes:
  check_mode:
    description: Fetches and checks the key, but does not write it.
    support: full
  diff_mode:
    description: Shows the fingerprints, before and after.
    support: full
"""

EXAMPLES = r"""
- name: Trust NVIDIA's repository for Ubuntu 24.04
  peerlane.gpu.repository_key:
    url: https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/x86_64/3bf863cc.pub
    fingerprint: EB693B3035CD5710E231E123A4B469963BF863CC
    dest: /usr/share/keyrings/peerlane-nvidia.gpg
"""

RETURN = r"""
fingerprint:
  description: Fingerprint of the key that is in place.
  returned: success
  type: str
  sample: EB693B3035CD5710E231E123A4B469963BF863CC
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import fetch_url

from ansible_collections.peerlane.gpu.plugins.module_utils.openpgp import KeyFileError, binary, fingerprints

# A key file with many signatures has some tens of kilobytes.
MAX_BYTES = 1024 * 1024


def fetch(module: AnsibleModule, url: str) -> bytes:
    """Return the bytes behind a URL or a path, or end the module with the reason."""
    path = url[len("file://") :] if url.startswith("file://") else url
    if path.startswith("/"):
        try:
            with open(path, "rb") as stream:
                return stream.read(MAX_BYTES)
        except OSError as error:
            module.fail_json(msg="{0}: {1}; give the key's path on this host".format(path, error.strerror))
    if not url.startswith(("https://", "http://")):
        module.fail_json(msg="{0}: is no URL and no absolute path; use https://, file:// or /path".format(url))
    response, info = fetch_url(module, url, timeout=module.params["timeout_s"])
    if response is None or info.get("status") != 200:
        module.fail_json(msg="{0}: {1}; check the URL and the network".format(url, info.get("msg", "no answer")))
    data: bytes = response.read(MAX_BYTES)
    return data


def current(dest: str) -> tuple[bytes, str]:
    """Return the bytes of the keyring in place and its fingerprints, or empty ones."""
    try:
        with open(dest, "rb") as stream:
            data = stream.read(MAX_BYTES)
        return data, ", ".join(fingerprints(data))
    except OSError:
        return b"", ""
    except KeyFileError as error:
        return data, "no key: {0}".format(error)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "fingerprint": {"type": "str", "required": True, "no_log": False},
            "dest": {"type": "path", "required": True},
            "timeout_s": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )
    url, dest = module.params["url"], module.params["dest"]
    expected = module.params["fingerprint"].replace(" ", "").upper()
    if len(expected) != 40 or set(expected) - set("0123456789ABCDEF"):
        module.fail_json(msg="fingerprint {0!r}: is not 40 hexadecimal digits".format(module.params["fingerprint"]))
    before, was = current(dest)
    data = fetch(module, url)
    try:
        found = fingerprints(data)
    except KeyFileError as error:
        module.fail_json(msg="{0}: {1}; nothing was changed".format(url, error))
    if found != [expected]:
        module.fail_json(
            msg="{0}: holds the key {1}, not {2}; nothing was trusted. Check the vendor's page, then set the "
            "fingerprint".format(url, ", ".join(found), expected)
        )
    keyring = binary(data)
    changed = keyring != before
    if changed and not module.check_mode:
        folder = os.path.dirname(dest)
        os.makedirs(folder, mode=0o755, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        with os.fdopen(handle, "wb") as stream:
            stream.write(keyring)
        os.chmod(temporary, 0o644)
        module.atomic_move(temporary, dest)
    diff = {"before": was + "\n" if was else "", "after": expected + "\n", "before_header": dest, "after_header": dest}
    module.exit_json(changed=changed, fingerprint=expected, diff=diff)


if __name__ == "__main__":
    main()
