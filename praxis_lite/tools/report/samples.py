"""Continuations that a job decoded at its checkpoints, as many as a page takes."""

from praxis_lite.run.job.job_dir import JobDir
from praxis_lite.run.trainer.metrics.records import DecodedFile, decoded_files

# By dataset and step: prompts and continuations.
Samples = dict[str, dict[int, list[tuple[str, str]]]]

NUM_PROMPTS = 20
_LONGEST = 2_000  # Letters of a prompt or a continuation.


class SamplesReader:
    """Reads a job's continuations; a file that did not change is read once."""

    def __init__(self, files: JobDir):
        self._files = files
        self._known: dict[DecodedFile, tuple[tuple[int, int], list[tuple[str, str]], int]] = {}

    def read(self, most: int) -> tuple[Samples, list[str]]:
        """Returns samples of at most so many letters, and notes on those that are left out.

        The newest steps come first.
        """
        samples: Samples = {}
        num_left_out = num_unreadable = 0
        for file in sorted(decoded_files(self._files), key=lambda file: (-file.step, file.dataset)):
            pairs, unreadable = self._read(file)
            num_unreadable += unreadable
            size = sum(len(prompt) + len(text) for prompt, text in pairs)
            if size > most:
                num_left_out += 1
            elif pairs:
                samples.setdefault(file.dataset, {})[file.step] = pairs
                most -= size
        notes = []
        if num_left_out:
            files = "a file" if num_left_out == 1 else f"{num_left_out} files"
            notes.append(f"The samples of {files} in decode are left out: the page has no room.")
        if num_unreadable:
            lines = "1 line is" if num_unreadable == 1 else f"{num_unreadable} lines are"
            notes.append(f"decode: {lines} left out, for want of a JSON object.")
        return samples, notes

    def _read(self, file: DecodedFile) -> tuple[list[tuple[str, str]], int]:
        """Returns prompts and continuations, and how many lines are no records."""
        try:
            status = file.path.stat()
            key = status.st_mtime_ns, status.st_size
            if self._known.get(file, (None,))[0] != key:
                decoded = file.read(NUM_PROMPTS)
                pairs = [(_cut(prompt), _cut(text)) for prompt, text in decoded.pairs]
                self._known[file] = key, pairs, decoded.num_unreadable
        except OSError:  # It was removed just now, or is no plain file.
            return [], 0
        return self._known[file][1:]


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
