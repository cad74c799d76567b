"""Ask for the sudo password, once, on the terminal."""

from __future__ import annotations

import getpass

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError


def ask(wanted: bool) -> str | None:
    """Return the password, or None where none is wanted."""
    if not wanted:
        return None
    try:
        return getpass.getpass("sudo password: ")
    except EOFError:
        todo = "set ansible_become_password in the inventory (ansible-vault) instead"
        raise InputError("there is no terminal to ask for the sudo password", "-K", todo) from None
