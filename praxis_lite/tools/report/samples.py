"""Continuations that a job decoded at its checkpoints, as many as a page takes."""

import itertools
import json
from pathlib import Path

from praxis_lite.files.json_text import opened
from praxis_lite.run.job.job_dir import COMMAND_LINE, JobDir

# By dataset and step: prompts and continuations.
Samples = dict[str, dict[int, list[tuple[str, str]]]]

NUM_PROMPTS = 20
_LONGEST = 2_000  # Letters of a prompt or a continuation.
_MOST_READ = 4 << 20  # Bytes of a file.


class SamplesReader:
    """Reads what lies in a job's `decode`; a file that did not change is read once."""

    def __init__(self, files: JobDir):
        self._folder = files.path / "decode"
        self._known: dict[Path, tuple[tuple[int, int], list[tuple[str, str]]]] = {}

    def read(self, most: int) -> tuple[Samples, int]:
        """Returns samples of at most so many letters, and how many files were left out.

        The newest steps come first.
        """
        steps = sorted(self._files(), key=lambda item: (-item[1], item[0]))
        samples: Samples = {}
        num_left_out = 0
        for dataset, step, file in steps:
            pairs = self._pairs(file, dataset)
            size = sum(len(prompt) + len(text) for prompt, text in pairs)
            if size > most:
                num_left_out += 1
            elif pairs:
                samples.setdefault(dataset, {})[step] = pairs
                most -= size
        return samples, num_left_out

    def _files(self) -> list[tuple[str, int, Path]]:
        return [
            (file.parent.name, int(file.stem), file)
            for file in self._folder.glob("*/*.jsonl") if file.stem.isdecimal()
        ]

    def _pairs(self, file: Path, dataset: str) -> list[tuple[str, str]]:
        try:
            status = file.stat()
            key = status.st_mtime_ns, status.st_size
            if self._known.get(file, (None,))[0] != key:
                with opened(file) as content:
                    text = content.read(_MOST_READ).decode("utf-8", "replace")
                lines = text.splitlines()
                # A command line adds its records to those of others before.
                shown = lines[-NUM_PROMPTS:] if dataset == COMMAND_LINE else lines[:NUM_PROMPTS]
                pairs = list(itertools.chain.from_iterable(map(_pair, shown)))
                self._known[file] = key, pairs
        except OSError:  # It was removed just now, or is no plain file.
            return []
        return self._known[file][1]


def _pair(line: str) -> list[tuple[str, str]]:
    """Returns the prompt and the continuation in a line, none if it is no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if not isinstance(record, dict):
        return []
    prompt = record.pop("prompt", "")
    return [(_text(prompt), _text(record.get("continuation", record)))]


def _text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
