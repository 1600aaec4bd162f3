"""The exceptions a user can see, and the exit code of each."""

from __future__ import annotations

EXIT_HEALTHY = 0
EXIT_FOUND = 1
EXIT_COULD_NOT_RUN = 2
EXIT_INTERRUPTED = 130


def text_of(error: BaseException) -> str:
    """What an exception says, in text that UTF-8 can hold; "" where its ``__str__`` fails."""
    try:
        return str(error).encode("utf-8", "replace").decode("utf-8")
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - the user's __str__ may raise anything, or return no string
        return ""


def first_line(error: BaseException) -> str:
    """What an exception says, in a line; its type where it says nothing."""
    return text_of(error).strip().partition("\n")[0] or type(error).__name__


def named_error(error: BaseException) -> str:
    """The type of an exception, and what it says in a line where it says something."""
    name, said = type(error).__name__, first_line(error)
    return name if said == name else f"{name}: {said}"


def reason_of(error: BaseException) -> str:
    """Why the system refuses something, without the path that ``str`` has; of another error what it says, in a line."""
    reason: str | None = getattr(error, "strerror", None)
    return reason or first_line(error)


class AmpdbgError(Exception):
    """ampdbg could not run; the message says what was given, what is allowed and what to type next.

    ``record`` is the Record of the steps that had ended by then, where a run was under way, else None.
    """

    exit_code = EXIT_COULD_NOT_RUN
    record: object | None = None


class ConfigError(AmpdbgError):
    """The config file is missing, unreadable or holds mistakes; the message lists all of them."""


class WorkloadError(AmpdbgError):
    """A target of the config could not be found, or is not what its key needs."""


class UserCodeError(AmpdbgError):
    """The user's own code raised.

    ``str(error)`` says which part of the workload was being run; ``user_traceback`` is the traceback
    text with the frames of ampdbg and torch's plumbing left out.
    """

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message)
        self.user_traceback = user_traceback


class ScriptError(AmpdbgError):
    """A script cannot be started: there is none of this name, or it is a launcher."""


class RecordError(AmpdbgError):
    """A record could not be read or written."""


class PatchError(AmpdbgError):
    """A patch could not be written into the user's files; none of them was changed."""
