"""Checks that all datasets in a job number their classes in the same way."""

from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.core.errors import ConfigError, shortened
from praxis_lite.inputs.base import InputPipeline


def require_same_classes(pipelines: Mapping[str, InputPipeline]) -> None:
    """Raises ConfigError if two pipelines assign different label values to the same class.

    Classes that occur in only one pipeline are allowed, since a split may not contain all classes.

    Args:
      pipelines: Pipelines keyed by config path. The error message includes the paths.
    """
    clashes = class_clashes({path: pipeline.classes() for path, pipeline in pipelines.items()})
    for label, name, (path, index), (other_path, other_index) in clashes:
        raise ConfigError(
            f"The class {shortened(repr(name))} has the {label} {index} in {path}, but "
            f"{other_index} in {other_path}. Pass the same classes to both (ImageFiles.classes), "
            "or save both with the same ClassLabel."
        )


def class_clashes(
    classes: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[str, str, tuple[str, int], tuple[str, int]]]:
    """Yields every class that has different indices in two datasets.

    Args:
      classes: Class names in the order of their indices, keyed by dataset and then by label.

    Yields:
      (label, class, (dataset, index), (other dataset, other index)).
    """
    first_seen: dict[tuple[str, str], tuple[str, int]] = {}
    for dataset, labels in classes.items():
        for label, names in labels.items():
            for index, name in enumerate(names):
                other = first_seen.setdefault((label, name), (dataset, index))
                if index != other[1]:
                    yield label, name, (dataset, index), other
