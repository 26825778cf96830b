"""Finds the path of the layer that raised an error, using the error's traceback.

A layer does not know its own path, because its parent constructs the layer before assigning it to
an attribute.
"""

import contextlib
import itertools
import linecache
import re
from collections.abc import Iterator
from types import FrameType, TracebackType

from flax import nnx

from praxis_lite.core.errors import ConfigError


@contextlib.contextmanager
def prefix_layer_path() -> Iterator[None]:
    """Prefixes the message of a ConfigError with the path of the layer that raised it."""
    try:
        yield
    except ConfigError as error:
        path = layer_path(error.__traceback__)
        if not path or hasattr(error, "layer_path"):
            raise
        prefixed = type(error)(f"{path}: {error}")
        prefixed.layer_path = path  # type: ignore[attr-defined]  # Only marks the error.
        raise prefixed from error


def layer_path(traceback: TracebackType | None) -> str:
    """Returns the path of the innermost layer that was being constructed or called.

    Args:
      traceback: Traceback of the error.

    Returns:
      A path such as "transformer/blocks/self_attention"; "" for the model itself.
    """
    # Consecutive frames may belong to the same layer: its constructor, methods and Flax wrappers.
    per_layer = [list(same) for _, same in itertools.groupby(_module_frames(traceback), _layer_id)]
    names = []
    for frames, children in itertools.pairwise(per_layer):
        constructors = [frame for frame in frames if frame[0].f_code.co_name == "__init__"]
        # The innermost constructor, which may belong to a base class, was constructing the child.
        (frame, line), (child_frame, _) = (constructors[-1:] or frames)[0], children[0]
        if constructors:
            names.append(_assigned_name(frame, line))
        else:
            names.append(attribute_name(frame.f_locals["self"], child_frame.f_locals["self"]))
    return "/".join(filter(None, names))


def _layer_id(frame_and_line: tuple[FrameType, int]) -> int:
    return id(frame_and_line[0].f_locals["self"])


def _module_frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames of methods of NNX modules, each with its current line."""
    while traceback is not None:
        if isinstance(traceback.tb_frame.f_locals.get("self"), nnx.Module):
            yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _assigned_name(frame: FrameType, line: int) -> str:
    """Returns the attribute that the current line of a constructor assigns to, or ""."""
    text = linecache.getline(frame.f_code.co_filename, line)
    assignment = re.match(r"\s*(?:self\.)?(\w+)\s*=[^=]", text)
    return assignment[1] if assignment else ""


def attribute_name(parent: nnx.Module, child: nnx.Module) -> str:
    """Returns the name of a layer in its parent, such as "blocks/3" in a list, or "".

    Scan and remat rebuild layers, so a layer may not be the same object as any attribute of its
    parent. In that case, the name of the first attribute of the same class is returned.
    """
    first_of_class = ""
    for name, value in vars(parent).items():
        is_list = isinstance(value, nnx.List)
        for index, element in enumerate(value if is_list else (value,)):
            if element is child:
                return f"{name}/{index}" if is_list else name
            if not first_of_class and type(element) is type(child):
                first_of_class = f"{name}/{index}" if is_list else name
    return first_of_class
