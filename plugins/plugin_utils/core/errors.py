"""Errors that a user can act on."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input, said in one line: what is wrong, where, and what to do."""

    def __init__(self, what: str, where: str = "", todo: str = "") -> None:
        self.what = what
        self.where = where
        self.todo = todo
        super().__init__(self.line())

    def line(self) -> str:
        """Return the one line that a user reads."""
        place = f"{self.where}: " if self.where else ""
        advice = f"; {self.todo}" if self.todo else ""
        return f"{place}{self.what}{advice}"
