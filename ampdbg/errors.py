"""The exceptions that a user can see, and the exit code of each."""

from __future__ import annotations

EXIT_HEALTHY = 0
EXIT_FOUND = 1
EXIT_COULD_NOT_RUN = 2
EXIT_INTERRUPTED = 130


def text_of(error: BaseException) -> str:
    """Return the message of an exception as text that UTF-8 can hold; "" if its ``__str__`` fails."""
    try:
        return str(error).encode("utf-8", "replace").decode("utf-8")
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's __str__ may raise anything, or return no string
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message; its type if the message is empty."""
    return text_of(error).strip().partition("\n")[0] or type(error).__name__


def named_error(error: BaseException) -> str:
    """Return the type of an exception, and the first line of its message if it has one."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


def reason_of(error: BaseException) -> str:
    """Return why the system refuses an operation, without the path in ``str``; else the first line of the message."""
    reason: str | None = getattr(error, "strerror", None)
    return reason or first_line(error)


class AmpdbgError(Exception):
    """ampdbg could not run; the message names what was given, what is allowed and what to type next.

    ``record`` is the Record of the steps that had ended, if a run was under way, else None.
    """

    exit_code = EXIT_COULD_NOT_RUN
    record: object | None = None


class ConfigError(AmpdbgError):
    """The config file is missing, unreadable or holds mistakes; the message lists all of them."""


class WorkloadError(AmpdbgError):
    """A target of the config could not be found, or is not what its key needs."""


class UserCodeError(AmpdbgError):
    """The user's own code raised.

    ``str(error)`` names the part of the workload that was running. ``user_traceback`` is the text of the traceback,
    without the frames of ampdbg and of torch's internals.
    """

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class ScriptError(AmpdbgError):
    """A script cannot be started: no script has this name, or it is a launcher."""


class RecordError(AmpdbgError):
    """A record could not be read or written."""


class PatchError(AmpdbgError):
    """A patch could not be written into the user's files; none of them was changed."""
