# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fetch files of a model repository over HTTP, with resume. The hub's two calls that are used:

* ``GET ENDPOINT/api/models/REPO/revision/REVISION?blobs=true``: the commit and the files with sizes and ids.
* ``GET ENDPOINT/REPO/resolve/COMMIT/PATH`` with ``Range``: the bytes; it may redirect to another host.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Callable

from ansible_collections.peerlane.gpu.plugins.module_utils.model_files import (
    CHUNK_BYTES,
    PART,
    ModelError,
    ModelFile,
    safe_path,
    wanted,
)

# A connection that gives nothing for this long is given up and opened again.
STALL_S = 30
RETRIES = 5


class _KeepTokenHome(urllib.request.HTTPRedirectHandler):
    """Follow a redirect, but send the token only to the host that it is for."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request to follow with."""
        follow = super().redirect_request(req, fp, code, msg, headers, newurl)
        if follow is not None and urllib.parse.urlsplit(newurl).netloc != urllib.parse.urlsplit(req.full_url).netloc:
            follow.remove_header("Authorization")
        return follow


class Hub:
    """One repository at one revision. ``token`` is sent to the endpoint's own host only."""

    def __init__(self, endpoint: str, repository: str, revision: str, token: str = "") -> None:
        self.endpoint = endpoint.rstrip("/")
        self.repository = repository
        self.revision = revision
        self._token = token
        self._opener = urllib.request.build_opener(_KeepTokenHome())

    def _open(self, path: str, start: int = 0) -> Any:
        request = urllib.request.Request(self.endpoint + path)  # noqa: S310  http and https only, checked by the module
        request.add_header("User-Agent", "peerlane")
        if self._token:
            request.add_header("Authorization", "Bearer " + self._token)
        if start:
            request.add_header("Range", "bytes={0}-".format(start))
        return self._opener.open(request, timeout=STALL_S)

    def listing(self) -> tuple[str, list[ModelFile]]:
        """Return the commit that the revision stands for, and its files."""
        path = "/api/models/{0}/revision/{1}?blobs=true".format(
            urllib.parse.quote(self.repository), urllib.parse.quote(self.revision, safe="")
        )
        try:
            with self._open(path) as answer:
                return parse_listing(json.loads(answer.read().decode("utf-8")))
        except urllib.error.HTTPError as error:
            raise ModelError(self._refusal(error.code)) from None
        except (OSError, ValueError) as error:
            raise ModelError("{0} does not answer: {1}".format(self.endpoint, _reason(error))) from None

    def _refusal(self, code: int) -> str:
        what = "{0}@{1}".format(self.repository, self.revision)
        if code in (401, 403):
            return "{0} refuses {1} (HTTP {2}): a token with access to it is needed".format(self.endpoint, what, code)
        if code == 404:
            return "{0} has no {1} (HTTP 404): check the repository, the revision, and whether it needs a token".format(
                self.endpoint, what
            )
        return "{0} answered HTTP {1} for {2}".format(self.endpoint, code, what)

    def fetch(self, folder: str, commit: str, one: ModelFile, keep_going: Callable[[], bool]) -> bool:
        """Bring one file into ``NAME.part``, from where an earlier try stopped. Return whether it is complete."""
        part = os.path.join(folder, one.path + PART)
        os.makedirs(os.path.dirname(part), exist_ok=True)
        address = "/{0}/resolve/{1}/{2}".format(
            urllib.parse.quote(self.repository), commit, urllib.parse.quote(one.path)
        )
        failures = 0
        while True:
            held = os.path.getsize(part) if os.path.exists(part) else 0
            if held > one.size:
                os.unlink(part)
                held = 0
            if held == one.size and os.path.exists(part):
                return True
            try:
                if not self._append(part, address, held, keep_going):
                    return False
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    raise ModelError("{0}: {1}".format(one.path, self._refusal(error.code))) from None
                failures = self._pause(one, failures, "HTTP {0}".format(error.code), keep_going)
            except OSError as error:
                failures = self._pause(one, failures, _reason(error), keep_going)
            else:
                grown = os.path.getsize(part) > held
                failures = 0 if grown else self._pause(one, failures, "the answer was empty", keep_going)

    def _append(self, part: str, address: str, held: int, keep_going: Callable[[], bool]) -> bool:
        with self._open(address, held) as answer:
            # A server that does not know ranges answers 200 with the whole file.
            mode = "ab" if answer.status == 206 else "wb"
            with open(part, mode) as writer:
                while True:
                    if not keep_going():
                        return False
                    chunk = answer.read1(CHUNK_BYTES)
                    if not chunk:
                        return True
                    writer.write(chunk)

    def _pause(self, one: ModelFile, failures: int, reason: str, keep_going: Callable[[], bool]) -> int:
        failures += 1
        if failures >= RETRIES:
            raise ModelError(
                "{0}: the download from {1} broke off {2} times, last: {3}; run again to go on from there".format(
                    one.path, self.endpoint, failures, reason
                )
            )
        until = time.monotonic() + min(2 ** (failures - 1), 8)
        while time.monotonic() < until and keep_going():
            time.sleep(0.1)
        return failures


def parse_listing(answer: Any) -> tuple[str, list[ModelFile]]:
    """Return the commit and the files of a hub's answer. Raises ModelError where it is none."""
    try:
        commit = str(answer["sha"])
        files = []
        for row in answer["siblings"]:
            path = str(row["rfilename"])
            if not wanted(path):
                continue
            if not safe_path(path):
                raise ModelError("the hub names a file {0!r}, which would leave its folder".format(path))
            large = row.get("lfs") or {}
            files.append(
                ModelFile(
                    path,
                    int(large.get("size", row["size"])),
                    sha256=str(large.get("sha256") or ""),
                    git_sha1="" if large else str(row.get("blobId") or ""),
                )
            )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError("the hub's answer is not a list of files with sizes") from None
    return commit, sorted(files, key=lambda one: one.path)


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", error)
    return str(getattr(inner, "strerror", None) or inner or type(error).__name__)
