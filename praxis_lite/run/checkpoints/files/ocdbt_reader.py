"""A file of an OCDBT database, read in Python: its header, and its kinds of numbers."""

import re
from collections.abc import Sequence

from praxis_lite.core.errors import ConfigError
from praxis_lite.run.checkpoints.files import zstd_frames

# Orbax lets a node grow to 100 MB.
MAX_NODE_BYTES = 2**27
MAX_NAME_BYTES = 2**12
# What a process wrote lies in a directory of its own; the merged tree refers to it there.
_DATA_FILE = re.compile(r"(ocdbt\.process_\d{1,9}/)?d/[0-9a-f]{32}")


class Reader:
    """Reads a file within its header and its checksum; fails where that ends.

    The checksum is left to TensorStore, and to the digests of whole files.
    """

    def __init__(self, encoded: bytes, magic: int, name: str):
        self._name, self._data, self._at = name, encoded, 0
        if len(encoded) < 18 or int.from_bytes(self.take(4), "big") != magic:
            self.fail("it does not begin as OCDBT's files do")
        if int.from_bytes(self.take(8), "little") != len(encoded):
            self.fail("it says another length than it has")
        self._data = encoded[:-4]
        if self.varint() != 0:
            self.fail("a version of the format that is not known")
        compression = self.varint()
        if compression == 1:
            self._data = zstd_frames.decoded(self._data[self._at :], MAX_NODE_BYTES)
            self._at = 0
        elif compression != 0 or len(encoded) > MAX_NODE_BYTES:
            self.fail("a compression that is not known")

    def fail(self, reason: str) -> None:
        raise ConfigError(f"{self._name}: {reason}")

    def take(self, length: int) -> bytes:
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            self.fail("it ends too early")
        return self._data[start : self._at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 64, 7):
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80 and value < 2**64:
                return value
        self.fail("a number of more than 64 bits")

    def varints(self, count: int) -> list[int]:
        if count > len(self._data) - self._at:  # Each has a byte, at least.
            self.fail("it ends too early")
        return [self.varint() for _ in range(count)]

    def end(self) -> None:
        if self._at != len(self._data):
            self.fail("it goes on after its end")

    def files(self, base_path: str) -> list[tuple[str, str]]:
        """Returns base path and path of each data file that is named; both in the directory."""
        count = self.varint()
        prefixes = [0, *self.varints(count - 1)] if count else []
        suffixes, base_lengths = self.varints(count), self.varints(count)
        files, path, last_base = [], b"", 0
        for prefix, suffix, base in zip(prefixes, suffixes, base_lengths, strict=True):
            if prefix > len(path) or (base != last_base and prefix > min(base, last_base)):
                self.fail("the name of a data file goes on from more than there is")
            path, last_base = path[:prefix] + self.take(suffix), base
            if base > len(path) or len(path) > MAX_NAME_BYTES:
                self.fail("the name of a data file cannot be")
            whole = base_path + path.decode("latin-1")
            # A version without a key has no root: a file without a name stands for it.
            if whole and not _DATA_FILE.fullmatch(whole):
                self.fail(f"the data file {whole[:80]!r} is not in its directory")
            files.append((base_path + path[:base].decode("latin-1"), whole))
        return files

    def named(
        self, indices: Sequence[int], files: Sequence[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        if any(index >= len(files) for index in indices):
            self.fail("it names a data file that is not in its table")
        return [files[index] for index in indices]

    def references(
        self, count: int, files: Sequence[tuple[str, str]]
    ) -> list[tuple[str, str, int, int]]:
        """Returns base path, path, offset and length of each."""
        named = self.named(self.varints(count), files)
        offsets, lengths = self.varints(count), self.varints(count)
        return [
            (*file, offset, length)
            for file, offset, length in zip(named, offsets, lengths, strict=True)
        ]
