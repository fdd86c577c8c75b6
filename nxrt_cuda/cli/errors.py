"""How a command ends early: a line on stderr and an exit status, never a traceback."""

from __future__ import annotations

__all__ = ["CheckFailedError", "CommandError", "InputError"]


class CommandError(Exception):
    """Ends the command; the message is the line that is printed.

    Attributes:
        status: the process's exit status.
    """

    status = 1


class CheckFailedError(CommandError):
    """The command ran, and a result is not what it has to be. Exit status 1."""


class InputError(CommandError):
    """What the user gave (a file, a name, an attribute, a device) cannot be used. Exit status 2."""

    status = 2
