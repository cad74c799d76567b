"""The key that the masks of ``--redact`` are made with."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.redact import key_of
from peerlane import output

# With fewer, somebody who guesses finds the words, and with them every address.
MIN_CHARACTERS = 12
_OWN_KEY = "redact.key"
_OWN_BYTES = 32


def key(given: str | None) -> bytes:
    """Return the key: of these words, of ``@FILE``, or the user's own, which is made on first use.

    The user's own key is random. One that could be worked out from the evidence would let anybody undo the masks.
    """
    if given is None:
        return _own()
    words: str | bytes = given
    if given.startswith("@"):
        place = Path(given[1:])
        try:
            words = place.read_bytes().strip()
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", f"--redact-key {given}", "check the path") from None
    if len(words) < MIN_CHARACTERS:
        todo = f"give {MIN_CHARACTERS} characters or more"
        raise InputError("is too short a key: the masks could be undone by trying", "--redact-key", todo)
    return key_of(words)


def _own() -> bytes:
    place = output.state_folder() / _OWN_KEY
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(secrets.token_bytes(_OWN_BYTES))
        data = place.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be used: {error.strerror}", str(place), "give --redact-key KEY") from None
    if len(data) != _OWN_BYTES:
        raise InputError("is no key", str(place), "delete it, or give --redact-key KEY")
    return data
