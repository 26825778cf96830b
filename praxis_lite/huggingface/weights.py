"""Maps the tensors of a Hugging Face checkpoint to slices of our weights, as NumPy views."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import fiddle as fdl
import numpy as np
from flax import nnx

from praxis_lite.core.errors import ConfigError, first_few
from praxis_lite.core.models.nnx_model import NnxModel
from praxis_lite.huggingface.decoder import lm_config
from praxis_lite.huggingface.decoder_settings import DecoderSettings
from praxis_lite.huggingface.family import EMBEDDING, HEAD, Family
from praxis_lite.huggingface.tensors.tensor_layouts import (
    Form,
    Weight,
    form_of,
    joined_form,
    named_form,
    piece_of,
)
from praxis_lite.layers.base.variables import num_stacked_dims

_EMBEDDING_PATH = "params/embedding_lookup/emb_var"
_HEAD_PATH = "params/softmax/logits_ffn/linear/w"


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor, or a slice of a tensor, that stores a slice of one of our weights.

    Attributes:
      tensor: Name of the tensor.
      path: Path of our weight, such as "params/transformer/blocks/self_attention/query/w".
      index: Index in the leading dims of our weight, such as the repeat of a scanned stack and the
        expert.
      sizes: Sizes of the other dims of our weight. If weights are interleaved in the tensor, the
        number of weights is appended.
      form: Layout of `sizes` in the tensor.
      dim: Dim of the tensor along which several parts are concatenated, or None if the tensor is
        not a concatenation.
      start: Offset of this part along `dim`.
      interleave_index: Index of this weight among the interleaved weights in the tensor, or None if
        weights are not interleaved.
    """

    tensor: str
    path: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]
    form: Form
    dim: int | None = None
    start: int = 0
    interleave_index: int | None = None

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the part in the tensor, including all interleaved weights."""
        return tuple(math.prod(self.sizes[i] for i in group) for group in self.form)

    def piece_shape(self) -> tuple[int, ...]:
        """Returns the shape of our weight at `index`."""
        return self.sizes if self.interleave_index is None else self.sizes[:-1]

    def to_weight_layout(self, tensor: np.ndarray) -> np.ndarray:
        """Returns a view of the part with the dims of our weight."""
        if self.dim is not None:
            stop = self.start + self.shape()[self.dim]
            tensor = tensor[(slice(None),) * self.dim + (slice(self.start, stop),)]
        # Split the tensor's dims into our dims, which are then still in the tensor's order.
        order = self._order()
        ours = tensor.reshape([self.sizes[i] for i in order]).transpose(np.argsort(order))
        return ours if self.interleave_index is None else ours[..., self.interleave_index]

    def to_tensor_layout(self, piece: np.ndarray) -> np.ndarray:
        """Converts our array to the tensor's layout; interleaved weights are stacked on dim -1."""
        return piece.transpose(self._order()).reshape(self.shape())

    def _order(self) -> list[int]:
        return [i for group in self.form for i in group]


def tensor_shape(tensor_parts: Sequence[Part]) -> tuple[int, ...]:
    """Returns the shape of a tensor from its parts."""
    last, shape = tensor_parts[-1], list(tensor_parts[-1].shape())
    if last.dim is not None:
        shape[last.dim] += last.start
    return tuple(shape)


def as_tensor(tensor_parts: Sequence[Part], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Assembles a tensor from slices of our weights, one slice per part."""
    first = tensor_parts[0]
    if first.interleave_index is not None:
        return first.to_tensor_layout(np.stack(pieces, axis=-1))
    arrays = [part.to_tensor_layout(x) for part, x in zip(tensor_parts, pieces, strict=True)]
    return arrays[0] if first.dim is None else np.concatenate(arrays, axis=first.dim)


def weights_of(settings: DecoderSettings) -> dict[str, Weight]:
    """Returns the shapes and dims of a model's weights, keyed by path, without creating arrays."""
    model = NnxModel(fdl.build(lm_config(settings))).abstract_module()
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.compat.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        weights[f"params/{'/'.join(map(str, path))}"] = Weight(
            tuple(variable.shape),
            num_stacked_dims(variable),
            metadata["dim_names"],
            metadata["matrix"],
        )
    return weights


def map_tensors(
    family: Family, settings: DecoderSettings, weights: Mapping[str, Weight]
) -> list[Part]:
    """Returns the tensors, or slices of tensors, that store our weights.

    Args:
      family: Table of the model's family.
      settings: Settings of the model.
      weights: Our weights, keyed by path; see `weights_of`.

    Raises:
      ConfigError: The table of the family contains no tensor or two tensors for a weight, or an
        entry does not fit the dims of its weight.
    """
    parts: list[Part] = []
    for name in family.tensors:
        for layer in range(settings.num_layers) if "{layer}" in name else [None]:
            parts += _parts_of(family, name, layer, settings, weights)
    missing = sorted(set(weights) - {part.path for part in parts})
    if missing:
        raise ConfigError(
            f"The table of {family.name} has no tensor for {first_few(missing)}, which the config "
            "needs. Add it to the table."
        )
    # No two tensors may store the same slice of a weight.
    tensor_of: dict[tuple[str, tuple[int, ...]], str] = {}
    for part in parts:
        if (key := (part.path, part.index)) in tensor_of:
            raise ConfigError(
                f"The table of {family.name} maps both {tensor_of[key]} and {part.tensor} to "
                f"{part.path}, which has the dims {weights[part.path]}. Remove one of them."
            )
        tensor_of[key] = part.tensor
    return parts


def _parts_of(
    family: Family,
    name: str,
    layer: int | None,
    settings: DecoderSettings,
    weights: Mapping[str, Weight],
) -> Iterator[Part]:
    """Yields the parts that an entry of the table describes in a layer, for every expert."""
    entry, has_expert = family.tensors[name], "{expert}" in name
    # For each expert, where its next target starts in the tensor's output dim.
    starts: dict[int | None, int] = collections.defaultdict(int)
    for number, target in enumerate(entry.to):
        path = _path(target, layer, settings)
        weight = weights.get(path)
        if weight is None:
            continue  # This model has no such bias, or its head is tied.
        where = f"The table of {family.name}: {name}: {path}"
        piece = piece_of(weight, layer is not None, has_expert, where)
        sizes, dim, interleave_index = piece.sizes, None, None
        if entry.dims is None:
            form = form_of(piece, inputs_first=family.inputs_first)
        else:
            form = named_form(piece, entry.dims)
        # A tensor with several targets interleaves them, or concatenates them along its output dim.
        if entry.joined is not None:
            form = joined_form(piece, form, entry.joined)
            sizes, interleave_index = (*sizes, len(entry.to)), number
        elif len(entry.to) > 1:
            dim = piece.output_dim(form)
        # Each block of a repeated pattern is a stack, with an entry for each repetition.
        repeat = () if layer is None else (layer // len(settings.pattern),)
        for expert in range(weight.shape[len(repeat)]) if has_expert else [None]:
            index = repeat if expert is None else (*repeat, expert)
            tensor = name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            part = Part(tensor, path, index, sizes, form, dim, starts[expert], interleave_index)
            if dim is not None:
                starts[expert] += part.shape()[dim]
            yield part


def _path(target: str, layer: int | None, settings: DecoderSettings) -> str:
    """Returns the path of the weight for an entry's target, or "" for the head of a tied model."""
    if target == EMBEDDING:
        return _HEAD_PATH if settings.is_tied else _EMBEDDING_PATH
    if target == HEAD:
        return "" if settings.is_tied else _HEAD_PATH
    if layer is None:
        return f"params/{target}"
    pattern_length = len(settings.pattern)
    within = "" if pattern_length == 1 else f"x_layers_{layer % pattern_length}/"
    return f"params/transformer/blocks/{within}{target}"
