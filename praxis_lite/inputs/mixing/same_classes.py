"""Classes that labels count: the same numbers in every dataset of a job."""

from collections.abc import Iterator, Mapping, Sequence

from praxis_lite.core.errors import ConfigError, shown
from praxis_lite.inputs.base import InputPipeline


def require_same_classes(pipelines: Mapping[str, InputPipeline]) -> None:
    """Raises ConfigError if a class has different numbers in two pipelines, given by their paths.

    Names that only one of them has are no error: a split may lack classes.
    """
    clashes = class_clashes({path: pipeline.classes() for path, pipeline in pipelines.items()})
    for label, name, (path, number), (other, expected) in clashes:
        raise ConfigError(
            f"The {label!r} of {path} counts the class {shown(repr(name))} as {number}, that of "
            f"{other} as {expected}. Say the classes once, and give them to both "
            "(ImageFiles.classes), or save both with the same ClassLabel."
        )


def class_clashes(
    classes: Mapping[str, Mapping[str, Sequence[str]]],
) -> Iterator[tuple[str, str, tuple[str, int], tuple[str, int]]]:
    """Yields (label, class, (dataset, number), (other dataset, other number)) of unequal numbers.

    Args:
        classes: by dataset and label, the names of the classes in the order of their numbers.
    """
    first: dict[tuple[str, str], tuple[str, int]] = {}
    for dataset, labels in classes.items():
        for label, names in labels.items():
            for number, name in enumerate(names):
                expected = first.setdefault((label, name), (dataset, number))
                if number != expected[1]:
                    yield label, name, (dataset, number), expected
