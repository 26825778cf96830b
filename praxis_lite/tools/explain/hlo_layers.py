"""Which layer an instruction comes from, read from the names that JAX writes into a program.

'jit(step)/transpose(jvp(encoder))/while/body/checkpoint/blocks/ffn/dot_general' is the gradient of
the layer encoder/blocks/ffn: the scopes that layers opened stand between what JAX adds, the names
of its transformations and of its loops. Written differently by jax 0.10 and 0.12, read alike.
"""

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from praxis_lite.core.user_lines import LIBRARY_FOLDERS
from praxis_lite.tools.explain.hlo_runs import Site
from praxis_lite.tools.explain.hlo_text import Instruction, Program, arrays_of, op_name_of

# What JAX puts between the scopes: loops, branches, rematerialisation, calls.
_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|eval_jaxpr|core_call|checkpoint|remat\d?|rematted_computation"
    r"|scan|shard_map|pjit|branch_\d+_fun|custom_(jvp|vjp)_call(_jaxpr)?|.*->.*|"
)
_FUNCTIONS = ("jit", "pjit", "pmap")  # Around the name of a function rather than a scope.
_FOR_LAYERS = os.path.join("layers", "base", "result_types.py")
_LIBRARY = re.compile(r"lib/python3|(site|dist)-packages")  # In a file's name.
GRADIENT_OF = "gradient of "  # Before the path of a layer, in its backward pass.


def layers_of(program: Program, site: Site) -> dict[str, int]:
    """Returns the layers an instruction's result comes from, with the bytes of each layer's part.

    There are several if XLA merged instructions. An unknown layer is ''.
    """
    # XLA takes apart again what it merged; each part has the name and the line that it had.
    parts = [
        item
        for item in site.computation.values()
        if item.opcode == "get-tuple-element"
        and item.operands[0] == site.instruction.name
        and op_name_of(item)
    ]
    bytes_of: dict[str, int] = {}
    for part in parts if len(parts) > 1 else [site.instruction]:
        layers = layers_of_name(op_name_of(part), source_line(source_frames(program, part)))
        if not any(layers):
            # If an argument is gathered before it is used, only the argument has a name.
            operands = [site.computation.get(name) for name in part.operands]
            arguments = [x for x in operands if x is not None and x.opcode == "parameter"]
            layers = [argument_path(op_name_of(x)) for x in arguments] or [""]
        for layer in layers:
            size = sum(array.bytes for array in arrays_of(part.shape)) // len(layers)
            bytes_of[layer] = bytes_of.get(layer, 0) + size
    return bytes_of


def nearest_layer(program: Program, site: Site) -> str:
    """Returns the layer that uses a gathered array, or that is reduced; '' if none is near.

    For collectives without a name: XLA drops it where a program runs on several slices.
    """
    computation, result = site.computation, [site.instruction]
    gathers = "reduce" not in site.instruction.opcode and site.instruction.opcode != "send"
    for _ in range(_HOPS):
        if gathers:
            names = {element.name for element in result}
            result = [one for one in computation.values() if names & set(one.operands)]
        else:
            result = [computation[n] for one in result for n in one.operands if n in computation]
        for item in result:
            layers = layers_of_name(op_name_of(item), source_line(source_frames(program, item)))
            if any(layers):
                return next(filter(None, layers))
    return ""


_HOPS = 6  # Copies, bitcasts and fusions without a name that lie between.


def layers_of_name(op_name: str, source_line: str = "") -> list[str]:
    """Returns the layer, 'encoder/ffn', of each operation that a name stands for.

    In a backward pass it is 'gradient of encoder/ffn', and `source_line` where no scope was opened.
    There are several if XLA merged operations, which it names 'common/path/(one:other)'.
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
    scopes, starts, is_gradient = [], [], False
    for part in parts:
        if around := re.fullmatch(r"(\w+)\((.*)\)", part):
            name, inside = around.groups()
            is_gradient |= name == "transpose"
            if name not in _FUNCTIONS:
                inner, is_transposed = _scopes(_split(inside, "/"))
                starts.append(len(scopes))
                scopes, is_gradient = scopes + inner, is_gradient or is_transposed
        elif not _STRUCTURE.fullmatch(part):
            scopes.append(part)
    # The backward pass of a jax.checkpoint has its scopes twice: 'transpose(jvp(a))/b/jvp(a)/b'.
    for start, again in reversed(list(itertools.pairwise(starts))):
        if scopes[start:again] == scopes[again : 2 * again - start]:
            del scopes[start:again]
    return scopes, is_gradient


def _split(text: str, separator: str) -> list[str]:
    """Returns the parts between separators that stand in no bracket."""
    parts, depth, begin = [], 0, 0
    for place, mark in enumerate(text):
        depth += (mark in "([{") - (mark in ")]}")
        if mark == separator and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    return [*parts, text[begin:]]


def argument_path(op_name: str) -> str:
    """Returns 'state/mdl_vars/ffn/w' of an argument's name, "state.mdl_vars['ffn']['w']"."""
    return "/".join(re.findall(r"[^\[\].'\\]+", op_name))


def together(bytes_of: Mapping[str, int]) -> str:
    """Returns a text for the layers of a merged operation: 'several in encoder'.

    It is 'several (encoder, decoder)', with up to three names, if they have no path in common. A
    layer with less than a hundredth of the bytes, such as a norm's scalar, is left out.
    """
    total = sum(bytes_of.values())
    layers = [layer for layer, size in bytes_of.items() if 100 * size >= total]
    if len(layers) == 1:
        return layers[0]
    all_gradients = all(layer.startswith(GRADIENT_OF) for layer in layers)
    paths = [layer.removeprefix(GRADIENT_OF).split("/") for layer in layers]
    common = os.path.commonprefix(paths)  # Of lists: of whole names.
    first = [name for name in dict.fromkeys(path[0] for path in paths) if name]
    names = ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")
    where = f"several in {'/'.join(common)}" if common and common[0] else f"several ({names})"
    return GRADIENT_OF + where if all_gradients else where


def source_line(frames: Sequence[tuple[str, int]]) -> str:
    """Returns 'model.py:13', the line to look at, from (file, line) of the frames, innermost first.

    The user's own line if there is one, otherwise this package's, or "".
    """
    local = own_frames(frames)
    users = [item for item in local if not item[0].startswith(LIBRARY_FOLDERS)]
    file, line = next(iter([*users, *local]), ("", 0))
    return f"{os.path.basename(file)}:{line}" if file else ""


def own_frames(frames: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the frames of the user's code and of this package, innermost first.

    Without the frames of libraries, without those that launched this package, and without those
    that call jax.numpy for a layer (result_types.py).
    """
    local = [
        (file, line) for file, line in frames
        if (file.startswith(LIBRARY_FOLDERS) and not file.endswith(_FOR_LAYERS))
        or not (file.startswith(LIBRARY_FOLDERS) or _LIBRARY.search(file))
    ]
    ours = [place for place, (file, _) in enumerate(local) if file.startswith(LIBRARY_FOLDERS)]
    return local[: ours[-1] + 1] if ours else local


def source_frames(program: Program, instruction: Instruction) -> list[tuple[str, int]]:
    """Returns (file, line) of the calls that an instruction comes from, innermost first."""
    if line := re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', instruction.attributes):
        return [(line.group(1), int(line.group(2) or 0))]
    names, places, stack = program.tables.values()
    # The outermost frame has the parent 0, or itself if frames count from one.
    first = _numbers(stack[1]).get("parent_frame_id", 0) if 1 in stack else 0
    number = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
    frames, at = [], int(number.group(1)) if number else 0
    while at in stack and len(frames) < len(stack):
        frame = _numbers(stack[at])
        place = _numbers(places[frame["file_location_id"]])
        frames.append((names[place["file_name_id"]].strip('"'), place["line"]))
        at = frame.get("parent_frame_id", 0) - first
    return frames


def _numbers(row: str) -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r"(\w+)=(\d+)", row)}
