"""Checks that a job's files are complete and readable, for the job's certificate.

A file that is missing, truncated or damaged is a fault. Some files are only required by certain
settings in the config or the newest checkpoint.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from praxis_lite.checkpoints.steps.manifest import committed_manifest, digest_of_config
from praxis_lite.config.build import build
from praxis_lite.config.config_json import LoadedConfig, load_config_file
from praxis_lite.core.errors import ConfigError, Error, first_few, shortened
from praxis_lite.experiment.recorded_job import tokenizers_of
from praxis_lite.experiment.run_config import RunConfig
from praxis_lite.host.file_reading import content_of, parse_json, read_json
from praxis_lite.inputs.base import TRAIN
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.job_history import evaluates
from praxis_lite.trainer.layout_table import read_layout, shape_text
from praxis_lite.trainer.metrics.json_lines import (
    evaluation_lines,
    json_line,
    training_lines,
)
from praxis_tools.goodput.spans import THE_END, read_spans

_HOOK = "Certificates"  # Suffix of the saved name of the hook that certifies steps.
_MISSING = "is missing, and the job has trained"


@dataclasses.dataclass(frozen=True)
class JobFiles:
    """A job's files up to a step, and what they must contain.

    Attributes:
      job_dir: Job directory.
      step: The newest saved step that the certificate covers.
      newest_step: The newest saved step.
      packages: Packages that the config may reference.
      first_step: The step from which the job's first launch started, 0 for a new model.
      start: The step from which the newest launch resumed.
    """

    job_dir: JobDir
    step: int
    newest_step: int
    packages: Sequence[str] = ()
    first_step: int = 0
    start: int = 0

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the newest checkpoint, or {} if the checkpoint is damaged."""
        try:
            manifest, wrong = committed_manifest(self.job_dir.checkpoints / str(self.newest_step))
        except ConfigError:
            return {}
        return {} if wrong else manifest

    @property
    def has_trained(self) -> bool:
        """Whether the job has trained; False if its only checkpoint is an imported model."""
        return self.step > 0 or "run_seed" in self.manifest.get("data", {})

    @functools.cached_property
    def config(self) -> LoadedConfig | None:
        """The job's config, or None if it cannot be read on this machine."""
        try:
            return load_config_file(self.job_dir.config_json, packages=self.packages)
        except ConfigError:
            return None

    @functools.cached_property
    def run(self) -> RunConfig | None:
        """The job's run settings, or None if they cannot be read on this machine."""
        try:
            return build(self.config.config.run) if self.config is not None else None
        except (ConfigError, AttributeError):
            return None

    # The faults_of_* methods yield error messages, and raise ConfigError for unreadable files.

    def faults_of_config(self) -> Iterator[str]:
        """Yields the faults in config.json."""
        path = self.job_dir.config_json
        parsed = read_json(path)
        if not isinstance(parsed, dict) or not isinstance(parsed.get("config"), dict):
            yield f"{path.name} is damaged: it contains no config"
            return
        saved = self.manifest.get("config_xxh3_128")
        if saved and digest_of_config(json.dumps(parsed)) != saved:
            yield (
                f"{path.name} differs from the config that step {self.newest_step} was saved with: "
                "it is damaged, or a launch has changed it and not saved a step since then"
            )

    def faults_of_layout(self) -> Iterator[str]:
        """Yields the faults in layout.json."""
        path, leaves = self.job_dir.layout_json, self.manifest.get("leaves", {})
        if not path.exists():
            if self.has_trained:
                yield f"{path.name} {_MISSING}"
            return
        arrays, _ = read_layout(path)
        here = {array.path: (array.shape, array.dtype) for array in arrays if array.path != "step"}
        saved = {name: (shape_text(leaf["shape"]), leaf["dtype"]) for name, leaf in leaves.items()}
        for name in sorted(here.keys() | saved.keys()) if saved else ():
            if here.get(name) != saved.get(name):
                yield (
                    f"{path.name} has {here.get(name)} for {shortened(name)}; step "
                    f"{self.newest_step} was saved with {saved.get(name)}"
                )

    def layout(self) -> Any:
        """Returns the SHA-256 digest of the logical shapes and dtypes, independent of the mesh."""
        arrays, _ = read_layout(self.job_dir.layout_json)
        return _digest([[x.path, x.shape, x.dtype] for x in arrays]) if arrays else None

    def metrics(self) -> list[dict[str, Any]]:
        """Returns the lines of metrics.jsonl up to `step`."""
        lines = training_lines(self.job_dir.metrics_jsonl)
        return [line for line in lines if line["step"] <= self.step]

    def faults_of_metrics(self) -> Iterator[str]:
        """Yields the faults in metrics.jsonl."""
        path = self.job_dir.metrics_jsonl
        if not path.exists():
            if self.has_trained and self.step > self.first_step:
                yield f"{path.name} {_MISSING}"
            return
        steps = [line["step"] for line in self.metrics()]
        expected = list(range(self.first_step + 1, self.step + 1))
        if steps != expected:
            missing = [str(step) for step in sorted(set(expected) - set(steps))]
            fault = f"lacks the steps {first_few(missing, 8)}" if missing else "has a step twice"
            yield f"{path.name} {fault}"
        yield from _cut_short(path)

    def evaluations(self) -> list[str]:
        """Returns the lines of eval_metrics.jsonl up to `step`."""
        lines = evaluation_lines(self.job_dir.eval_metrics_jsonl)
        return [json_line(line) for line in lines if line["step"] <= self.step]

    def faults_of_evaluations(self) -> Iterator[str]:
        """Yields the faults in eval_metrics.jsonl."""
        path, run = self.job_dir.eval_metrics_jsonl, self.run
        if path.exists():
            yield from _cut_short(path)
        if run is None or self.config is None:
            return
        datasets = set(self.config.config.datasets) - {TRAIN}
        # A launch that was stopped or killed may not have evaluated its last step.
        spans = read_spans(self.job_dir.timeline_jsonl)
        has_ended = not spans or spans[-1].ended_by == THE_END
        last = self.step if has_ended else self.step - 1
        due = {step for step in range(self.start + 1, last + 1) if evaluates(run, step)}
        if not datasets or not due:
            return
        evaluated: dict[int, set[str]] = {}
        for line in evaluation_lines(path):
            evaluated.setdefault(line["step"], set()).add(line["dataset"])
        missing = [str(step) for step in sorted(due) if not datasets <= evaluated.get(step, set())]
        if missing:
            yield f"{path.name} lacks evaluations of the steps {first_few(missing, 8)}"

    def faults_of_certificates(self) -> Iterator[str]:
        """Yields the faults in certificates.jsonl, not counting differences between results."""
        path = self.job_dir.certificates_jsonl
        if path.exists():
            yield from faults_of_lines(path)
        every = None if self.run is None else self.run.certify_every_steps
        hooks = self.manifest.get("data", {}).get("hooks") or {}
        if every is None or not any(name.split("#")[0].endswith(_HOOK) for name in hooks):
            return
        certified = {
            line.get("step")
            for text in (_texts(path) if path.exists() else [])
            if isinstance(line := _parsed(text), dict)
        }
        due = range(-(-(self.start + 1) // every) * every, self.step + 1, every)
        if missing := [str(step) for step in due if step not in certified]:
            yield f"{path.name} lacks certificates of the steps {first_few(missing, 8)}"

    def faults_of_timeline(self) -> Iterator[str]:
        """Yields the faults in timeline.jsonl."""
        path = self.job_dir.timeline_jsonl
        if not path.exists():
            if self.has_trained:
                yield f"{path.name} {_MISSING}"
            return
        yield from faults_of_lines(path)
        spans = read_spans(path)
        if len(spans) < sum(1 for text in _texts(path) if _parsed(text) is not None):
            yield f"{path.name} has invalid lines"
        steps = [item.last_step for item in spans if item.last_step is not None]
        if max(steps, default=0) < self.step:
            yield f"{path.name} ends before step {self.step}"

    def folders(self) -> Iterator[tuple[str, Path]]:
        """Yields (name, path) for each folder with a tokenizer or the initial model."""
        for path in sorted(self.job_dir.tokenizers.glob("*/")):
            yield f"{path.parent.name}/{path.name}", path
        if self.job_dir.huggingface.is_dir():
            yield self.job_dir.huggingface.name, self.job_dir.huggingface

    def faults_of_tokenizers(self) -> Iterator[str]:
        """Yields a fault for each tokenizer in the config that has no copy in the job directory."""
        if self.config is None or not self.has_trained:
            return
        for directory, copy in tokenizers_of(self.config.config, self.job_dir).items():
            if copy is None:
                yield f"{self.job_dir.tokenizers.name}/ has no copy of {shortened(directory)}"


def all_faults(faults: Callable[[], Iterable[str]]) -> list[str]:
    """Collects faults in a list. An error while reading a file is added as a fault."""
    found = []
    try:
        for fault in faults():
            found.append(fault)
    except (Error, OSError) as error:
        found.append(str(error.args[0] if isinstance(error, Error) else error))
    return found


def faults_of_lines(path: Path, *, may_be_cut: bool = False) -> Iterator[str]:
    """Yields a fault if lines are not JSON objects, and another if the last line is truncated.

    Args:
      path: The file.
      may_be_cut: Whether lines may be truncated because the job was killed.
    """
    # A truncated line does not end with "}".
    damaged = [
        str(number)
        for number, text in enumerate(_texts(path), start=1)
        if not isinstance(_parsed(text), dict) and (not may_be_cut or text.endswith("}"))
    ]
    if damaged:
        yield f"{path.name} is damaged in the lines {first_few(damaged, 8)}"
    if not may_be_cut:
        yield from _cut_short(path)


def faults_of_folder(folder: Path) -> Iterator[str]:
    """Yields a fault for each empty or damaged file in a tokenizer folder."""
    from praxis_lite.inputs.tokenizers.files import has_tokenizer

    for path in _files(folder):
        try:
            content = content_of(path)
            if not content:
                yield f"{folder.name}/{path.name} is empty"
            elif path.suffix == ".json":
                parse_json(content.decode())
        except OSError as error:
            yield f"{folder.name}/{path.name} cannot be read: {error.strerror or error}"
        except ValueError as error:
            yield f"{folder.name}/{path.name} is damaged: {shortened(str(error), 100)}"
    if folder.parent.name == "tokenizers" and not has_tokenizer(folder):
        yield f"{folder.name}/ contains no tokenizer"


def digest_of_folder(folder: Path) -> str:
    """Returns the SHA-256 digest of the names and contents of a folder's files."""
    return _digest(
        [[path.name, hashlib.sha256(content_of(path)).hexdigest()] for path in _files(folder)]
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _cut_short(path: Path) -> Iterator[str]:
    content = content_of(path)
    if content and not content.endswith(b"\n"):
        yield f"{path.name} is cut short"


def _texts(path: Path) -> list[str]:
    text = content_of(path).decode("utf-8", "replace")
    return [line for line in text.split("\n") if line]


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
