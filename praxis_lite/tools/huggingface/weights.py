"""The part of our weights that each of their tensors is, and back: views, and no copies."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from praxis_lite.core.errors import ConfigError, few
from praxis_lite.host.optional_packages import optional_module
from praxis_lite.tools.huggingface.family import Family
from praxis_lite.tools.huggingface.fields.decoder_settings import DecoderSettings

_HEAD = "params/softmax/logits_ffn/linear/w"


def rearranged(array: Any, form: str, **sizes: int) -> Any:
    """Returns an array in another form, both in einops' words: "(n k) d -> d n k"."""
    einops = optional_module("einops", "A model of Hugging Face")
    return einops.rearrange(array, form, **sizes)


def groups_of(side: str) -> list[list[str]]:
    """Returns the names in each dim on a side of a form: "(n k) d": [["n", "k"], ["d"]]."""
    groups = re.findall(r"\(([^)]*)\)|(\S+)", side)
    return [(several or single).split() for several, single in groups]


@dataclasses.dataclass(frozen=True)
class Part:
    """A tensor of theirs as a part of a weight of ours.

    Attributes:
      tensor: its name.
      path: of our weight, "params/transformer/blocks/self_attention/query/w".
      index: of the part in the weight's leading dims: the turn of a scanned stack, the expert.
      form: "theirs -> ours" in einops' words, such as "(n k) d -> d n k".
      sizes: of the dims that `form` names.
      dim: along which several parts make up the tensor, one behind the other; None: this is all.
      start: of this part along `dim`.
      of_heads: (i, number): of each head's dims k it is the i-th of as many blocks, or of the last
        dim each so-many-th from the i-th on; `form` then has a dim c of these, and comes with c
        first.
    """

    tensor: str
    path: str
    index: tuple[int, ...]
    form: str
    sizes: Mapping[str, int]
    dim: int | None = None
    start: int = 0
    of_heads: tuple[int, int] | None = None

    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the part in the tensor; with `of_heads` that of all parts."""
        groups = groups_of(self.form.split(" -> ")[0])
        return tuple(math.prod(self.sizes[name] for name in group) for group in groups)

    def piece_shape(self) -> tuple[int, ...]:
        """Returns the shape of the array at `index` of our weight."""
        return tuple(self.sizes[name] for name in self._ours())

    def as_ours(self, tensor: np.ndarray) -> np.ndarray:
        """Returns the part as it lies in our weight: a view of the tensor."""
        if self.of_heads is not None:
            return rearranged(tensor, self.form, **self.sizes)[self.of_heads[0]]
        if self.dim is not None:
            stop = self.start + self.shape()[self.dim]
            tensor = tensor[(slice(None),) * self.dim + (slice(self.start, stop),)]
        return rearranged(tensor, self.form, **self.sizes)

    def _ours(self) -> list[str]:
        names = self.form.split(" -> ")[1].split()
        return names if self.of_heads is None else names[1:]


def tensor_shape(of_tensor: Sequence[Part]) -> tuple[int, ...]:
    """Returns the shape of a tensor, given all parts that it has."""
    last, shape = of_tensor[-1], list(of_tensor[-1].shape())
    if last.dim is not None:
        shape[last.dim] += last.start
    return tuple(shape)


def as_tensor(of_tensor: Sequence[Part], pieces: Sequence[np.ndarray]) -> np.ndarray:
    """Returns a tensor, given all its parts and the arrays at the index of each in our weights."""
    first = of_tensor[0]
    theirs, ours = first.form.split(" -> ")
    back = f"{ours} -> {theirs}"
    if first.of_heads is not None:
        return rearranged(np.stack(pieces), back, **first.sizes)
    result = [
        rearranged(piece, back, **part.sizes)
        for part, piece in zip(of_tensor, pieces, strict=True)
    ]
    return result[0] if first.dim is None else np.concatenate(result, axis=first.dim)


def parts(
    family: Family, settings: DecoderSettings, weights: Mapping[str, tuple[int, ...]]
) -> list[Part]:
    """Returns the parts of all of our weights.

    Args:
      weights: our weights' shapes by path.

    Raises:
      ConfigError: a weight of ours has no tensor in the family's table.
    """
    result, pattern_length = [], len(settings.pattern)
    for name, entry in family.tensors.items():
        paths = [entry["to"]] if isinstance(entry["to"], str) else entry["to"]
        for layer in range(settings.num_layers) if "{layer}" in name else [0]:
            result += _of_tensor(name, entry, paths, layer, settings, pattern_length, weights)
    missing = sorted(set(weights) - {part.path for part in result})
    if missing:
        raise ConfigError(
            f"The table of {family.name} has no tensor for {few(missing)}: the config asks for "
            "what the family's table does not describe."
        )
    return result


def _of_tensor(
    name: str, entry: Mapping[str, Any], to: Sequence[str], layer: int,
    settings: DecoderSettings, pattern_length: int, weights: Mapping[str, tuple[int, ...]],
) -> Iterator[Part]:
    """Yields the parts that the tensors of a name hold, in a layer."""
    in_stack, of_experts = "{layer}" in name, "{expert}" in name
    num_leading = int(in_stack) + int(of_experts)
    joined, starts = entry.get("joined"), {}
    for number, target in enumerate(to):
        path, form = _place(target, entry["form"], layer if in_stack else None, settings,
                            pattern_length)
        if path not in weights:
            continue  # A bias that this config has not, the head of a tied one.
        shape = weights[path][num_leading:]
        if len(form.split(" -> ")[1].split()) > len(shape):
            # The one head of keys and values that all queries share has no dim in our weight.
            form = form.replace("(n k)", "k").replace("n k", "k")
        sizes = dict(zip(form.split(" -> ")[1].split(), shape, strict=True))
        place: dict[str, Any] = {}
        if joined == "heads":
            theirs, after = form.split(" -> ")
            form = f"{theirs.replace('n k', 'n c k')} -> c {after}"
            sizes, place = sizes | {"c": len(to)}, {"of_heads": (number, len(to))}
        elif joined == "interleaved":
            theirs, after = form.split(" -> ")
            *others, last = theirs.split()
            form = f"{' '.join([*others, f'({last} c)'])} -> c {after}"
            sizes, place = sizes | {"c": len(to)}, {"of_heads": (number, len(to))}
        for expert in range(settings.num_experts or 0) if of_experts else [0]:
            index = ((layer // pattern_length,) if in_stack else ()) + (
                (expert,) if of_experts else ()
            )
            tensor = name.replace("{layer}", str(layer)).replace("{expert}", str(expert))
            part = Part(tensor, path, index, form, sizes, **place)
            if isinstance(joined, int):
                part = dataclasses.replace(part, dim=joined, start=starts.get(expert, 0))
                starts[expert] = part.start + part.shape()[joined]
            yield part


def _place(
    target: str, form: str, layer: int | None, settings: DecoderSettings, pattern_length: int
) -> tuple[str, str]:
    """Returns the path of our weight, and the form with both sides."""
    form = form if "->" in form else f"{form} -> {form}"
    if target == "embedding" and settings.is_tied:
        return _HEAD, "v d -> d v"
    if target == "embedding":
        return "params/embedding_lookup/emb_var", form
    if target == "head":
        return "" if settings.is_tied else _HEAD, form
    if layer is None:
        return f"params/{target}", form
    within = "" if pattern_length == 1 else f"x_layers_{layer % pattern_length}/"
    return f"params/transformer/blocks/{within}{target}", form
