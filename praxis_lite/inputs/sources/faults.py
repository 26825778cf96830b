"""What may be wrong with an example, and the error that names its place."""

from praxis_lite.errors import ConfigError

# By the names that a source's `skip` takes.
FAULTS = {
    "truncated": "the end of a file is missing",
    "damaged": "a record is not what its checksum says, or an image cannot be read",
    "not_utf8": "text is not UTF-8",
    "not_json": "a line is no JSON object",
    "missing_key": "an example lacks the key that is asked for",
    "id_beyond_vocabulary": "an id is negative, or not below the vocabulary's size",
    "no_answer": "a conversation has nothing to learn",
}


class BadExample(ConfigError):
    """An example that cannot be used: where it stands, what was found, how to mend it.

    Attributes:
      fault: the name of what is wrong, of FAULTS.
    """

    def __init__(self, fault: str, where: str, found: str, fix: str):
        super().__init__(
            f"{where} {found}. {fix} Or leave out what is like it, and have it counted: "
            f"skip=[{fault!r}] of the source."
        )
        self.fault = fault

    def __reduce__(self) -> tuple:
        # Worker processes send it as the message and the fault.
        return _remade, (str(self), self.fault)


def _remade(message: str, fault: str) -> BadExample:
    made = BadExample.__new__(BadExample)
    ValueError.__init__(made, message)
    made.fault = fault
    return made
