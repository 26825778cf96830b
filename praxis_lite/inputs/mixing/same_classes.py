"""Checks that a class has the same number in every dataset of a job."""

from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.base import InputPipeline


def require_same_classes(pipelines: Mapping[str, InputPipeline]) -> None:
    """Raises ConfigError if a class has different numbers in two pipelines, given by their paths.

    A class that only one of them has is allowed: a split may lack classes.
    """
    clashes = class_clashes({path: pipeline.classes() for path, pipeline in pipelines.items()})
    for label, name, (path, number), (other, expected) in clashes:
        raise ConfigError(
            f"The {label!r} of {path} has the number {number} for the class {shown(repr(name))}, "
            f"but that of {other} has {expected}. Pass the same classes to both "
            "(ImageFiles.classes), or save both with the same ClassLabel."
        )


def class_clashes(
    classes: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[str, str, tuple[str, int], tuple[str, int]]]:
    """Yields every class with different numbers in two datasets.

    Args:
        classes: by dataset and label, the names of the classes in the order of their numbers.

    Yields:
        (label, class, (dataset, number), (other dataset, other number)).
    """
    first: dict[tuple[str, str], tuple[str, int]] = {}
    for dataset, labels in classes.items():
        for label, names in labels.items():
            for number, name in enumerate(names):
                expected = first.setdefault((label, name), (dataset, number))
                if number != expected[1]:
                    yield label, name, (dataset, number), expected
