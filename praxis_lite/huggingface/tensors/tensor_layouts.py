"""Layouts of our weights in Hugging Face tensors: which dims of ours each tensor dim merges."""

import re
from typing import NamedTuple

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.layers.base.dims import CLASSES, NONE, Matrix

# For each dim of a tensor, the dims of our weight that it merges, outermost first.
Form = tuple[tuple[int, ...], ...]
_HEADS, _HEAD_DIM, _EXPERT = "heads", "head_dim", "expert"
_OF_TWO_DIMS = Matrix((0,), (1,))


class Weight(NamedTuple):
    """A weight of ours as its layer declares it.

    Attributes:
      shape: stacked dims first.
      num_stacked: leading dims that number layers.
      names: of the other dims, None for a dim without a name.
      matrix: which of the other dims are inputs and outputs; None: of two dims, the first and the
        second.
    """

    shape: tuple[int, ...]
    num_stacked: int
    names: tuple[str | None, ...]
    matrix: Matrix | None

    def __str__(self) -> str:
        """Returns the dims for a message: "layers 3, embed 48, 16 without a name"."""
        names = ("layers",) * self.num_stacked + self.names
        return ", ".join(
            f"{name} {size}" if name else f"{size} without a name"
            for name, size in zip(names, self.shape, strict=True)
        )


class Piece(NamedTuple):
    """The part of our weight that is in one tensor: of one layer, or of one expert in it.

    Attributes:
      sizes: of the dims.
      names: of the dims, None for a dim without a name.
      matrix: which of them are inputs and outputs; NONE: it is not a matrix.
      description: the table, the tensor, the weight and its dims, for messages.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    matrix: Matrix
    description: str

    def outputs_in(self, form: Form) -> int:
        """Returns the dim of a tensor with the outputs; of a weight that is no matrix the last."""
        outputs = [i for i, group in enumerate(form) if set(group) & set(self.matrix.made)]
        return outputs[0] if outputs else len(form) - 1


def piece_of(weight: Weight, has_layer: bool, has_expert: bool, where: str) -> Piece:
    """Returns the part of a weight that is in a tensor.

    Args:
      has_layer, has_expert: whether the tensor's name has {layer}, {expert}.
      where: the table, the tensor and the weight, for messages.

    Raises:
      ConfigError: the weight is not stacked as the name is numbered.
    """
    sizes, names, matrix = weight.shape[weight.num_stacked :], weight.names, weight.matrix
    description = f"{where} has the dims {weight}"
    if weight.num_stacked != int(has_layer) or (has_expert and names[:1] != (_EXPERT,)):
        raise ConfigError(
            f"{description}. {{layer}} in a tensor's name numbers the layers of a stack, and "
            "{expert} a dim of that name, which is the first of a layer's weight."
        )
    if matrix is None:
        matrix = _OF_TWO_DIMS if len(sizes) == 2 else NONE
    first = int(has_expert)
    summed, made = (tuple(i - first for i in dims) for dims in matrix)
    return Piece(sizes[first:], names[first:], Matrix(summed, made), description)


def form_of(piece: Piece, *, inputs_first: bool = False) -> Form:
    """Returns the layout in which PyTorch stores a weight.

    A matrix is [outputs, inputs] as in Linear, or with `inputs_first` the other way round; dims
    that number matrices, such as experts, precede both. Embedding and head have the vocabulary
    first. Everything else has our layout, except that a bias merges heads and their dims.
    """
    summed, made = piece.matrix
    others = [(i,) for i in range(len(piece.sizes)) if i not in (*summed, *made)]
    if made:
        return (*others, *((summed, made) if inputs_first else (made, summed)))
    if piece.names == (_HEADS, _HEAD_DIM):
        return ((0, 1),)
    return tuple(sorted(others, key=lambda group: piece.names[group[0]] != CLASSES))


def named_form(piece: Piece, dims: str) -> Form:
    """Returns the layout that a table states, "embed (heads head_dim)".

    A weight without "heads" has one head, which all queries share.

    Raises:
      ConfigError: the names are not those of the dims, each once.
    """
    group = r"\([\w\s]*\)|\w+"
    left, form = list(range(len(piece.sizes))), []
    for names in re.findall(group, dims):
        form.append(())
        for name in names.strip("()").split():
            if name == _HEADS and _HEADS not in piece.names:
                continue
            index = next((i for i in left if piece.names[i] == name), None)
            if index is None:
                raise ConfigError(
                    f"{piece.description}, but dims = {dims!r} also names {name!r}."
                    f"{did_you_mean(name, filter(None, piece.names))}"
                )
            left.remove(index)
            form[-1] += (index,)
    if left or re.sub(group, "", dims).strip():
        raise ConfigError(
            f"{piece.description}, but dims = {dims!r} does not name them all. Write each name "
            'once, and merged dims as "(heads head_dim)".'
        )
    return tuple(form)


def joined_form(piece: Piece, form: Form, joined: str) -> Form:
    """Returns a layout with one more dim, which numbers weights: after the heads, or the last.

    Raises:
      ConfigError: `joined` is "heads", and the weight has none.
    """
    if joined == _HEADS and _HEADS not in piece.names:
        raise ConfigError(
            f"{piece.description}, but joined = 'heads' needs a dim of this name. The layer's "
            "`splits` names its dims."
        )
    after = piece.names.index(_HEADS) if joined == _HEADS else form[-1][-1]
    number = len(piece.sizes)
    return tuple(
        tuple(x for i in group for x in ((i, number) if i == after else (i,))) for group in form
    )
