"""The two ways a command fails: the user's input is wrong, or the run is."""


class UserError(Exception):
    """The user's input is wrong (exit code 2).

    The message is one sentence that names the file, line, flag or key, says what was
    expected, and what to do about it. The command line prints it without a traceback.
    """


class RunError(Exception):
    """The run itself failed: non-finite loss, too many broken pictures (exit code 1)."""
