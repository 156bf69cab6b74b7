"""Errors that are addressed to the user. The one idea: whoever raises one has written the whole message; nobody adds a traceback."""


class UserError(Exception):
    """What the user can mend: one clear message, no traceback."""
