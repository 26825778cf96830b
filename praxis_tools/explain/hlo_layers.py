"""Finds the layer of an instruction from the op names that JAX writes into HLO.

For example, 'jit(step)/transpose(jvp(encoder))/while/body/checkpoint/blocks/ffn/dot_general' is the
gradient of the layer encoder/blocks/ffn, because JAX inserts the names of transformations and loops
between the scopes of layers. The formats of jax 0.10 and 0.12 are supported.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from praxis_lite.core.user_lines import LIBRARY_FOLDERS
from praxis_tools.explain.hlo_text import (
    Computation,
    Instruction,
    Program,
    arrays_of,
    op_name_of,
)

# Names that JAX adds between scopes: loops, branches, rematerialization, calls.
_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|eval_jaxpr|core_call|checkpoint|remat\d?|rematted_computation"
    r"|scan|shard_map|pjit|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|.*->.*|"
)
_FUNCTIONS = ("jit", "pjit", "pmap")  # In jit(step), "step" is a function and not a scope.
_FOR_LAYERS = os.path.join("layers", "base", "result_types.py")
_LIBRARY = re.compile(r"lib/python3|(site|dist)-packages")  # Part of other libraries' paths.
GRADIENT_OF = "gradient of "  # Prefix of a layer's path in the backward pass.


def layer_of(program: Program, instruction: Instruction, computation: Computation) -> str:
    """Returns the layer of an instruction, or '' if it is unknown.

    If XLA merged instructions from several layers, this returns, for example, 'several in encoder'.
    """
    return merged_layer(layers_of(program, instruction, computation))


def layers_of(
    program: Program, instruction: Instruction, computation: Computation
) -> dict[str, int]:
    """Returns the layers of an instruction, and the bytes of the result for each layer.

    There are several layers if XLA merged instructions. Unknown layers are ''.
    """
    # XLA extracts the parts of a merged instruction, which keep their original names and lines.
    parts = [
        part
        for part in computation.values()
        if part.opcode == "get-tuple-element"
        and part.operands[0] == instruction.name
        and op_name_of(part)
    ]
    bytes_of: dict[str, int] = {}
    for part in parts if len(parts) > 1 else [instruction]:
        layers = _named_layers(program, part)
        if not any(layers):
            # If a program argument is gathered directly, only the argument has a name, such as
            # "state.mdl_vars['ffn']['w']".
            operands = [computation.get(name) for name in part.operands]
            layers = [
                "/".join(re.findall(r"[^\[\].'\\]+", op_name_of(operand)))
                for operand in operands
                if operand is not None and operand.opcode == "parameter"
            ] or [""]
        for layer in layers:
            size = sum(array.bytes for array in arrays_of(part.shape)) // len(layers)
            bytes_of[layer] = bytes_of.get(layer, 0) + size
    return bytes_of


# Maximum number of unnamed instructions (copies, bitcasts, fusions) to follow from a collective.
_MAX_HOPS = 6


def nearest_layer(program: Program, instruction: Instruction, computation: Computation) -> str:
    """Returns the layer of a collective's nearest user or operand with a known layer, or ''.

    In programs for several slices, XLA drops the names of collectives. A gathered array belongs to
    the layer that uses it, and a reduced or sent array belongs to the layer that computed it.
    """
    follows_users = "reduce" not in instruction.opcode and instruction.opcode != "send"
    reached = [instruction]
    for _ in range(_MAX_HOPS):
        if follows_users:
            names = {instruction.name for instruction in reached}
            reached = [user for user in computation.values() if names & set(user.operands)]
        else:
            reached = [
                computation[name]
                for instruction in reached
                for name in instruction.operands
                if name in computation
            ]
        for neighbor in reached:
            layers = _named_layers(program, neighbor)
            if any(layers):
                return next(filter(None, layers))
    return ""


def _named_layers(program: Program, instruction: Instruction) -> list[str]:
    line = source_line(source_frames(program, instruction))
    return layers_of_name(op_name_of(instruction), line)


def layers_of_name(op_name: str, source_line: str = "") -> list[str]:
    """Returns the layers in an op_name, one for each merged operation.

    A layer is, for example, 'encoder/ffn', or 'gradient of encoder/ffn' in the backward pass.
    Outside of any scope, `source_line` is used instead. XLA names merged operations
    'common/path/(first:second)'.
    """
    layers = []
    for name in _unmerged(op_name):
        # The last part is the operation itself.
        scopes, is_gradient = _scopes(_split(name, "/")[:-1])
        layer = "/".join(scopes) or source_line
        layers.append(f"{GRADIENT_OF}{layer}" if layer and is_gradient else layer)
    return layers


def _unmerged(op_name: str) -> Iterator[str]:
    parts = _split(op_name, "/")
    if not (parts and parts[-1].startswith("(") and parts[-1].endswith(")")):
        yield op_name
        return
    before = "/".join(parts[:-1])
    for item in _split(parts[-1][1:-1], ":"):
        yield from _unmerged(f"{before}/{item}" if before else item)


def _scopes(parts: Iterable[str]) -> tuple[list[str], bool]:
    """Returns the layer scopes in an op name, and whether the op belongs to the backward pass.

    For example, ['transpose(jvp(encoder))', 'while', 'body', 'ffn'] is (['encoder', 'ffn'], True).
    """
    scopes: list[str] = []
    starts: list[int] = []  # Index of the first scope inside each transformation.
    is_gradient = False
    for part in parts:
        if transformed := re.fullmatch(r"(\w+)\((.*)\)", part):
            name, inside = transformed.groups()
            is_gradient |= name == "transpose"
            if name not in _FUNCTIONS:
                inner, is_transposed = _scopes(_split(inside, "/"))
                starts.append(len(scopes))
                scopes, is_gradient = scopes + inner, is_gradient or is_transposed
        elif not _STRUCTURE.fullmatch(part):
            scopes.append(part)
    # In the backward pass of jax.checkpoint, scopes occur twice: 'transpose(jvp(a))/b/jvp(a)/b'.
    for start, again in reversed(list(itertools.pairwise(starts))):
        if scopes[start:again] == scopes[again : 2 * again - start]:
            del scopes[start:again]
    return scopes, is_gradient


def _split(text: str, separator: str) -> list[str]:
    """Splits text at separators outside of brackets."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0:
            parts.append(text[begin:index])
            begin = index + 1
    return [*parts, text[begin:]]


def merged_layer(bytes_of: Mapping[str, int]) -> str:
    """Describes the layers of a merged operation, for example as 'several in encoder'.

    If the layers have no common path, the result is 'several (encoder, decoder)', with up to three
    names. Layers with less than 1% of the bytes, such as the scalar of a norm, are ignored.
    """
    total = sum(bytes_of.values())
    layers = [layer for layer, size in bytes_of.items() if 100 * size >= total]
    if len(layers) == 1:
        return layers[0]
    all_gradients = all(layer.startswith(GRADIENT_OF) for layer in layers)
    paths = [layer.removeprefix(GRADIENT_OF).split("/") for layer in layers]
    common = os.path.commonprefix(paths)  # These are lists, so only complete names match.
    first = [name for name in dict.fromkeys(path[0] for path in paths) if name]
    names = ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")
    where = f"several in {'/'.join(common)}" if common and common[0] else f"several ({names})"
    return GRADIENT_OF + where if all_gradients else where


def source_line(frames: Sequence[tuple[str, int]]) -> str:
    """Returns the innermost line of the user's code, such as 'model.py:13', or "".

    If no frame belongs to the user's code, a line of this library is returned.

    Args:
      frames: (file, line) of each call, innermost first.
    """
    frames = own_frames(frames)
    users = [frame for frame in frames if not frame[0].startswith(LIBRARY_FOLDERS)]
    file, line = next(iter([*users, *frames]), ("", 0))
    return f"{os.path.basename(file)}:{line}" if file else ""


def own_frames(frames: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the frames from the user's code and from this library, innermost first.

    This omits frames from other libraries, from the program that launched this library, and from
    result_types.py, which calls jax.numpy on behalf of layers.
    """
    own = [
        (file, line)
        for file, line in frames
        if (file.startswith(LIBRARY_FOLDERS) and not file.endswith(_FOR_LAYERS))
        or not (file.startswith(LIBRARY_FOLDERS) or _LIBRARY.search(file))
    ]
    of_package = [i for i, (file, _) in enumerate(own) if file.startswith(LIBRARY_FOLDERS)]
    return own[: of_package[-1] + 1] if of_package else own


def source_frames(program: Program, instruction: Instruction) -> list[tuple[str, int]]:
    """Returns the stack of an instruction as (file, line) of each call, innermost first."""
    if line := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes):
        return [(line.group(1), int(line.group(2) or 0))]
    file_names, locations, stack = program.tables.values()
    # The outermost frame has the parent 0, or itself if frames count from one.
    first = _numbers(stack[1]).get("parent_frame_id", 0) if 1 in stack else 0
    frame_id = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    frames: list[tuple[str, int]] = []
    index = int(frame_id.group(1)) if frame_id else 0
    while index in stack and len(frames) < len(stack):
        frame = _numbers(stack[index])
        location = _numbers(locations[frame["file_location_id"]])
        frames.append((file_names[location["file_name_id"]].strip('"'), location["line"]))
        index = frame.get("parent_frame_id", 0) - first
    return frames


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}
