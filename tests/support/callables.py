"""Callables with various signatures for tests of configs; config.json can refer to them."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from nowhere import Nothing


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Mesh:
    ici_mesh_shape: Sequence[int]
    dcn_mesh_shape: Sequence[int] | None = None
    axis_names: tuple[str, ...] = ("replica", "data", "mdl")


class Layer:
    def __init__(
        self,
        width: int = 13,
        *,
        rate: float = 0.5,
        use_bias: bool = True,
        name: str = "layer",
        note: str | None = None,
        split: Sequence[str | int | None] | None = None,
        kind: Literal["rotary", "learned", "none"] = "rotary",
        pair: tuple[int, str] = (7, "x"),
        table: Mapping[str, int] | None = None,
        dtype: jnp.dtype = jnp.bfloat16,
        either: int | str | None = None,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.gelu,
        color: Color = Color.RED,
        text_only: "Nothing | None" = None,
        anything: Any = None,
    ):
        self.given = {key: value for key, value in locals().items() if key != "self"}


def loose(count=7, scale=0.5, names=("a", "b"), dtype=np.float32, flag=False, **extra: int):
    return dict(locals())


def chain(*parts: Any):
    return parts


@dataclasses.dataclass
class Corpus:
    path: str
    options: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Pipeline:
    corpus: Corpus
    batch_size: int = 7
    schedule: float | Callable[[int], float] = 0.25


def power(step: int, exponent: float = 0.5) -> float:
    return step**exponent


def odd(rate: float = 1, width: int = None, name: str = 7, pair: tuple[float, ...] = (1, 0.5)):
    return dict(locals())


@jax.jit
def jitted(x: jax.Array) -> jax.Array:
    return x
