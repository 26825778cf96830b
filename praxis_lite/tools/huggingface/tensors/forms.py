"""The form of a weight in a tensor of theirs: which dims of ours each dim of the tensor holds."""

import re
from typing import NamedTuple

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.layers.base.dims import CLASSES, NONE, Matrix

# For each dim of a tensor the dims of our weight that it holds, the outer ones first.
Form = tuple[tuple[int, ...], ...]
_HEADS, _HEAD_DIM, _EXPERT = "heads", "head_dim", "expert"
_OF_TWO_DIMS = Matrix((0,), (1,))


class Weight(NamedTuple):
    """A weight of ours as its layer declares it.

    Attributes:
      shape: stacked dims first.
      num_stacked: leading dims that number layers.
      names: of the other dims, None where the layer gives none.
      matrix: those of the other dims that are inputs, and outputs; None: two dims are a matrix.
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
    """The dims of our weight that a tensor holds: of a layer, or of an expert in it.

    Attributes:
      sizes: of the dims.
      names: of the dims, None where the layer declares none.
      matrix: which of them are inputs, and which outputs; NONE: it is no matrix.
      said: the start of messages: the table, the tensor, the weight and its dims.
    """

    sizes: tuple[int, ...]
    names: tuple[str | None, ...]
    matrix: Matrix
    said: str

    def outputs_in(self, form: Form) -> int:
        """Returns the dim of a tensor that holds the outputs; without a matrix it is the last."""
        holds = [i for i, group in enumerate(form) if set(group) & set(self.matrix.made)]
        return holds[0] if holds else len(form) - 1


def piece_of(weight: Weight, has_layer: bool, has_expert: bool, where: str) -> Piece:
    """Returns the dims of a weight but those that a tensor's name numbers.

    Args:
      has_layer, has_expert: whether the name has {layer}, {expert}.
      where: the table, the tensor and the weight, for the messages.

    Raises:
      ConfigError: the name numbers what the weight does not, or the other way round.
    """
    sizes, names, matrix = weight.shape[weight.num_stacked :], weight.names, weight.matrix
    said = f"{where} has the dims {weight}"
    if weight.num_stacked != int(has_layer) or (has_expert and names[:1] != (_EXPERT,)):
        raise ConfigError(
            f"{said}. {{layer}} in a tensor's name numbers the layers of a stack, and {{expert}} a "
            "dim of that name, which is the first of a layer's weight."
        )
    if matrix is None:
        matrix = _OF_TWO_DIMS if len(sizes) == 2 else NONE
    first = int(has_expert)
    summed, made = (tuple(i - first for i in dims) for dims in matrix)
    return Piece(sizes[first:], names[first:], Matrix(summed, made), said)


def form_of(piece: Piece, *, inputs_first: bool = False) -> Form:
    """Returns the form in which PyTorch stores a weight.

    A matrix lies as that of a Linear: its outputs are one dim and its inputs the next, or with
    `inputs_first` the other way round; dims that number matrices, such as experts, are before both.
    A table of classes has them first, in an embedding as in the head. All else lies as it
    does here, but that heads and the dims of a head are one dim in a bias.
    """
    summed, made = piece.matrix
    others = [(i,) for i in range(len(piece.sizes)) if i not in (*summed, *made)]
    if made:
        return (*others, *((summed, made) if inputs_first else (made, summed)))
    if piece.names == (_HEADS, _HEAD_DIM):
        return ((0, 1),)
    return tuple(sorted(others, key=lambda group: piece.names[group[0]] != CLASSES))


def named_form(piece: Piece, dims: str) -> Form:
    """Returns the form that a table says, "embed (heads head_dim)".

    The name "heads" says nothing of a weight without: the one head of keys that all queries share.

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
                    f"{piece.said}, and dims = {dims!r} names one more, {name!r}."
                    f"{did_you_mean(name, filter(None, piece.names))}"
                )
            left.remove(index)
            form[-1] += (index,)
    if left or re.sub(group, "", dims).strip():
        raise ConfigError(
            f"{piece.said}, and dims = {dims!r} does not name them all. Write each name once, and "
            'those that are one dim of the tensor as "(heads head_dim)".'
        )
    return tuple(form)


def joined_form(piece: Piece, form: Form, joined: str) -> Form:
    """Returns a form with a dim more, which numbers weights: after the heads, or the last.

    Raises:
      ConfigError: it is joined by heads, and the weight has none.
    """
    if joined == _HEADS and _HEADS not in piece.names:
        raise ConfigError(
            f"{piece.said}, and joined = 'heads' wants one of this name. The layer's `splits` "
            "names its dims."
        )
    after = piece.names.index(_HEADS) if joined == _HEADS else form[-1][-1]
    number = len(piece.sizes)
    return tuple(
        tuple(x for i in group for x in ((i, number) if i == after else (i,))) for group in form
    )
