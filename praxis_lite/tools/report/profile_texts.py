"""The tables of a job's profiles, which set what was measured beside its plan."""

from praxis_lite.files.json_text import opened
from praxis_lite.run.job.job_dir import JobDir

_MOST_PROFILES, _MOST_BYTES = 3, 20_000


def profile_texts(files: JobDir) -> dict[int, str]:
    """Returns the tables of a job's newest profiles by the first step of each."""
    found = [
        (int(file.parent.name), file) for file in files.profiles.glob("*/profile.txt")
        if file.parent.name.isdecimal()
    ]
    texts = {}
    for step, file in sorted(found)[-_MOST_PROFILES:]:
        try:
            with opened(file) as content:
                texts[step] = content.read(_MOST_BYTES).decode("utf-8", "replace")
        except OSError:  # It was removed just now, or is no plain file.
            continue
    return texts
