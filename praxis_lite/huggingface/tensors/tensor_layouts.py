"""Layouts of our weights in Hugging Face tensors, whose dims may merge several of our dims."""

import re
from typing import NamedTuple

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.layers.base.dims import CLASSES, NONE, Matrix

# For each dim of a tensor, the dims of our weight that are merged into it, outermost first.
Form = tuple[tuple[int, ...], ...]
_HEADS, _HEAD_DIM, _EXPERT = "heads", "head_dim", "expert"
_OF_TWO_DIMS = Matrix((0,), (1,))


class Weight(NamedTuple):
    """The shape and dims of one of our weights, as its layer declares them.

    Attributes:
      shape: Shape, with stacked dims first.
      num_stacked: Number of leading dims that index layers.
      names: Names of the other dims, with None for dims without a name.
      matrix: Input and output dims among the other dims. If None, a weight with two such dims is a
        matrix [in, out], and other weights are not matrices.
    """

    shape: tuple[int, ...]
    num_stacked: int
    names: tuple[str | None, ...]
    matrix: Matrix | None

    def __str__(self) -> str:
        """Formats the dims for messages, as "layers 3, embed 48, unnamed 16"."""
        names = ("layers",) * self.num_stacked + self.names
        return ", ".join(
            f"{name or 'unnamed'} {size}" for name, size in zip(names, self.shape, strict=True)
        )


class Piece(NamedTuple):
    """The slice of our weight that one tensor stores: one layer, or one expert in a layer.

    Attributes:
      sizes: Sizes of the dims.
      names: Names of the dims, with None for dims without a name.
      matrix: Input and output dims, or NONE if the weight is not a matrix.
      description: The table, tensor, weight and dims, for error messages.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    matrix: Matrix
    description: str

    def output_dim(self, form: Form) -> int:
        """Returns the index of the tensor's output dim; the last dim if it is not a matrix."""
        outputs = [i for i, group in enumerate(form) if set(group) & set(self.matrix.outputs)]
        return outputs[0] if outputs else len(form) - 1


def piece_of(weight: Weight, has_layer: bool, has_expert: bool, where: str) -> Piece:
    """Returns the slice of a weight that one tensor stores.

    Args:
      weight: Our weight.
      has_layer: Whether the tensor's name contains {layer}.
      has_expert: Whether the tensor's name contains {expert}.
      where: The table, the tensor and the weight, for error messages.

    Raises:
      ConfigError: {layer} or {expert} does not match the leading dims of the weight.
    """
    sizes, names, matrix = weight.shape[weight.num_stacked :], weight.names, weight.matrix
    description = f"{where} has the dims {weight}"
    if weight.num_stacked != int(has_layer) or (has_expert and names[:1] != (_EXPERT,)):
        raise ConfigError(
            f"{description}. Use {{layer}} in the tensor's name if and only if the weight is a "
            'stack of layers, and {expert} only if its next dim is named "expert".'
        )
    if matrix is None:
        matrix = _OF_TWO_DIMS if len(sizes) == 2 else NONE
    first = int(has_expert)
    contracted, outputs = (tuple(i - first for i in dims) for dims in matrix)
    return Piece(sizes[first:], names[first:], Matrix(contracted, outputs), description)


def form_of(piece: Piece, *, inputs_first: bool = False) -> Form:
    """Returns the layout in which PyTorch usually stores a weight.

    A matrix is stored as [outputs, inputs], as in Linear, or as [inputs, outputs] if `inputs_first`
    is set. Batch dims of matrices, such as experts, come first. Embeddings and heads are stored
    with the vocabulary first. Other weights keep the order of our dims, but a bias of shape [heads,
    head_dim] is flattened.
    """
    contracted, outputs = piece.matrix
    others = [(i,) for i in range(len(piece.sizes)) if i not in (*contracted, *outputs)]
    if outputs:
        return (*others, *((contracted, outputs) if inputs_first else (outputs, contracted)))
    if piece.names == (_HEADS, _HEAD_DIM):
        return ((0, 1),)
    return tuple(sorted(others, key=lambda group: piece.names[group[0]] != CLASSES))


def named_form(piece: Piece, dims: str) -> Form:
    """Parses a layout in a table, such as "embed (heads head_dim)".

    The name "heads" is ignored for weights without this dim, which have a single head.

    Raises:
      ConfigError: `dims` does not name every dim exactly once.
    """
    group = r"\([\w\s]*\)|\w+"
    remaining = list(range(len(piece.sizes)))
    # `remaining` contains our dims without a name so far. Each item of `form` is a tensor's dim.
    form: list[tuple[int, ...]] = []
    for names in re.findall(group, dims):
        form.append(())
        for name in names.strip("()").split():
            if name == _HEADS and _HEADS not in piece.names:
                continue
            index = next((i for i in remaining if piece.names[i] == name), None)
            if index is None:
                raise ConfigError(
                    f"{piece.description}, but dims = {dims!r} also lists {name!r}."
                    f"{did_you_mean(name, filter(None, piece.names))}"
                )
            remaining.remove(index)
            form[-1] += (index,)
    if remaining or re.sub(group, "", dims).strip():
        raise ConfigError(
            f"{piece.description}, but dims = {dims!r} does not list all of them. List each name "
            'once, and use "(heads head_dim)" for merged dims.'
        )
    return tuple(form)


def joined_form(piece: Piece, form: Form, joined: str) -> Form:
    """Adds a dim for the index of interleaved weights, after the heads or at the end.

    Raises:
      ConfigError: `joined` is "heads", but the weight has no such dim.
    """
    if joined == _HEADS and _HEADS not in piece.names:
        raise ConfigError(
            f"{piece.description}, but joined = 'heads' requires a dim named heads. Name the dims "
            "in the layer's `splits`."
        )
    # The index of the interleaved weights follows the heads, or is innermost.
    previous_dim = piece.names.index(_HEADS) if joined == _HEADS else form[-1][-1]
    new_dim = len(piece.sizes)
    return tuple(
        tuple(x for i in group for x in ((i, new_dim) if i == previous_dim else (i,)))
        for group in form
    )
