"""Maps tensors of a Hugging Face checkpoint to parts of our weights, as views without copies."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import fiddle as fdl
import numpy as np
from flax import nnx

from praxis_lite.core.errors import ConfigError, few
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
    """A tensor, or a part of one, as a part of one of our weights.

    Attributes:
      tensor: its name.
      path: of our weight, "params/transformer/blocks/self_attention/query/w".
      index: of the part in the weight's leading dims: the repeat of a scanned stack, the expert.
      sizes: of the weight's other dims.
      form: their layout in the tensor.
      dim: along which several parts are concatenated to the tensor; None: this part is all of it.
      start: of this part along `dim`.
      turn: the number of this weight among those that alternate in the tensor; `sizes` then ends
        with how many there are, as a dim of `form`. None: they do not alternate.
    """

    tensor: str
    path: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]
    form: Form
    dim: int | None = None
    start: int = 0
    turn: int | None = None

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the part in the tensor; of alternating weights, of all of them."""
        return tuple(math.prod(self.sizes[i] for i in group) for group in self.form)

    def piece_shape(self) -> tuple[int, ...]:
        """Returns the shape of the array at `index` of our weight."""
        return self.sizes if self.turn is None else self.sizes[:-1]

    def to_weight_layout(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the part in the layout of our weight: a view of the tensor."""
        if self.dim is not None:
            stop = self.start + self.shape()[self.dim]
            tensor = tensor[(slice(None),) * self.dim + (slice(self.start, stop),)]
        order = self._order()
        ours = tensor.reshape([self.sizes[i] for i in order]).transpose(np.argsort(order))
        return ours if self.turn is None else ours[..., self.turn]

    def to_tensor_layout(self, piece: np.ndarray) -> np.ndarray:
        """Returns our array (of alternating weights, their stack) in the tensor's layout."""
        return piece.transpose(self._order()).reshape(self.shape())

    def _order(self) -> list[int]:
        return [i for group in self.form for i in group]


def tensor_shape(of_tensor: Sequence[Part]) -> tuple[int, ...]:
    """Returns the shape of a tensor, given all parts that it has."""
    last, shape = of_tensor[-1], list(of_tensor[-1].shape())
    if last.dim is not None:
        shape[last.dim] += last.start
    return tuple(shape)


def as_tensor(of_tensor: Sequence[Part], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a tensor, given all its parts and the arrays at the index of each in our weights."""
    first = of_tensor[0]
    if first.turn is not None:
        return first.to_tensor_layout(np.stack(pieces, axis=-1))
    arrays = [part.to_tensor_layout(x) for part, x in zip(of_tensor, pieces, strict=True)]
    return arrays[0] if first.dim is None else np.concatenate(arrays, axis=first.dim)


def weights_of(settings: DecoderSettings) -> dict[str, Weight]:
    """Returns a model's weights by path as its layers declare them, without creating arrays."""
    model = NnxModel(fdl.build(lm_config(settings))).abstract_module()
    weights = {}
    for path, variable in nnx.to_flat_state(nnx.compat.state(model, nnx.Param)):
        metadata = variable.get_metadata()
        weights[f"params/{'/'.join(map(str, path))}"] = Weight(
            tuple(variable.shape), num_stacked_dims(variable), metadata["dim_names"],
            metadata["matrix"],
        )
    return weights


def map_tensors(
    family: Family, settings: DecoderSettings, weights: Mapping[str, Weight]
) -> list[Part]:
    """Returns the parts of all of our weights.

    Args:
      weights: ours by path.

    Raises:
      ConfigError: a weight has no tensor in the family's table, or two; or an entry does not fit
        the dims of its weight.
    """
    parts: list[Part] = []
    for name in family.tensors:
        for layer in range(settings.num_layers) if "{layer}" in name else [None]:
            parts += _parts_of(family, name, layer, settings, weights)
    missing = sorted(set(weights) - {part.path for part in parts})
    if missing:
        raise ConfigError(
            f"The table of {family.name} has no tensor for {few(missing)}, which the config "
            "needs. Add it to the table."
        )
    tensor_of: dict[tuple[str, tuple[int, ...]], str] = {}
    for part in parts:
        if (key := (part.path, part.index)) in tensor_of:
            raise ConfigError(
                f"The table of {family.name}: {tensor_of[key]} and {part.tensor} are both "
                f"{part.path}, whose dims are {weights[part.path]}. Remove one of them."
            )
        tensor_of[key] = part.tensor
    return parts


def _parts_of(
    family: Family, name: str, layer: int | None, settings: DecoderSettings,
    weights: Mapping[str, Weight],
) -> Iterator[Part]:
    """Yields the parts in the tensors of a name, in a layer."""
    entry, has_expert = family.tensors[name], "{expert}" in name
    starts: dict[int | None, int] = collections.defaultdict(int)
    for number, target in enumerate(entry.to):
        path = _path(target, layer, settings)
        weight = weights.get(path)
        if weight is None:
            continue  # A bias that this config lacks, or the head of a tied model.
        where = f"The table of {family.name}: {name}: {path}"
        piece = piece_of(weight, layer is not None, has_expert, where)
        sizes, dim, turn = piece.sizes, None, None
        if entry.dims is None:
            form = form_of(piece, inputs_first=family.inputs_first)
        else:
            form = named_form(piece, entry.dims)
        if entry.joined is not None:
            form = joined_form(piece, form, entry.joined)
            sizes, turn = (*sizes, len(entry.to)), number
        elif len(entry.to) > 1:
            dim = piece.outputs_in(form)
        in_stack = () if layer is None else (layer // len(settings.pattern),)
        for expert in range(weight.shape[len(in_stack)]) if has_expert else [None]:
            index = in_stack if expert is None else (*in_stack, expert)
            tensor = name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            part = Part(tensor, path, index, sizes, form, dim, starts[expert], turn)
            if dim is not None:
                starts[expert] += part.shape()[dim]
            yield part


def _path(target: str, layer: int | None, settings: DecoderSettings) -> str:
    """Returns the path of our weight; "" if the model has none."""
    if target == EMBEDDING:
        return _HEAD_PATH if settings.is_tied else _EMBEDDING_PATH
    if target == HEAD:
        return "" if settings.is_tied else _HEAD_PATH
    if layer is None:
        return f"params/{target}"
    pattern_length = len(settings.pattern)
    within = "" if pattern_length == 1 else f"x_layers_{layer % pattern_length}/"
    return f"params/transformer/blocks/{within}{target}"
