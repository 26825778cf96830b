"""Which layer of a model an error comes from: its path, read off the error's traceback.

A layer does not know its own path: its parent gives it a name only once it is built.
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
def naming_the_layer() -> Iterator[None]:
    """Puts the path of the layer that raised a ConfigError in front of its message."""
    try:
        yield
    except ConfigError as error:
        path = layer_path(error.__traceback__)
        if not path or hasattr(error, "layer_path"):
            raise
        named = type(error)(f"{path}: {error}")
        named.layer_path = path
        raise named from error


def layer_path(traceback: TracebackType | None) -> str:
    """Returns the path of the layer that was being built or called when an error was raised.

    For instance "transformer/blocks/self_attention"; "" of the model itself.
    """
    # Several frames in a row may be one layer's: Flax's, its constructor, a function in it.
    per_layer = [list(same) for _, same in itertools.groupby(_module_frames(traceback), _layer_id)]
    names = []
    for frames, children in itertools.pairwise(per_layer):
        constructors = [item for item in frames if item[0].f_code.co_name == "__init__"]
        # The innermost, perhaps a base class's, was building the child.
        (frame, line), (child_frame, _) = (constructors[-1:] or frames)[0], children[0]
        if constructors:
            names.append(_assigned_name(frame, line))
        else:
            names.append(attribute_name(frame.f_locals["self"], child_frame.f_locals["self"]))
    return "/".join(filter(None, names))


def _layer_id(frame_and_line: tuple[FrameType, int]) -> int:
    return id(frame_and_line[0].f_locals["self"])


def _module_frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    """Yields the frames of layers' methods, each with the line that it has reached."""
    while traceback is not None:
        if isinstance(traceback.tb_frame.f_locals.get("self"), nnx.Module):
            yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _assigned_name(frame: FrameType, line: int) -> str:
    """Returns the name that a constructor was about to give to the object it was building."""
    text = linecache.getline(frame.f_code.co_filename, line)
    assignment = re.match(r"\s*(?:self\.)?(\w+)\s*=[^=]", text)
    return assignment[1] if assignment else ""


def attribute_name(parent: nnx.Module, child: nnx.Module) -> str:
    """Returns the name of a layer in its parent, "blocks/3" in a list, or "" if it has none there.

    A scan or a remat rebuilds a layer, so that it is no longer its parent's own: then this is the
    first attribute of its class.
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
