"""Decoding against the real Pax: the goldens, and more settings in pax_options/decode.npz."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import layers
from praxis_lite.core import NnxModel
from praxis_lite.decode import BeamSearch, Decoder, Greedy, Sample, pax_outputs
from praxis_lite.pax.weights import mdl_vars_from_pax
from tests.support.goldens import Arrays, by_kind, golden_arrays, pax_arrays, pax_cases
from tests.support.marks import slow_but

LONGEST = 12  # Tokens of a row in every case after a forward pass.


@functools.cache
def lm(rotary: bool = False) -> NnxModel:
    """Returns the language model of the goldens."""
    atten = functools.partial(
        layers.DotProductAttention,
        combine_qkv=True,
        use_bias=False,
        atten_logit_cap=50.0,
        use_rotary_position_emb=rotary,
    )
    return NnxModel(
        functools.partial(
            layers.TransformerLm,
            13,
            8,
            12,
            num_heads=2,
            num_layers=2,
            position_emb_tpl=None if rotary else layers.PositionalEmbedding,
            softmax_tpl=functools.partial(
                layers.SharedEmbeddingSoftmax, scale_sqrt_depth=True, soft_cap_logits=30.0
            ),
            transformer_layer_tpl=functools.partial(layers.Transformer, tr_atten_tpl=atten),
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaxSample(Sample):
    """Draws with Pax's noise: one draw for all rows of a step, from the step's key."""

    noise: Any = dataclasses.field(hash=False, compare=False)  # [steps, R, C]

    def gumbel(self, rows, shape):
        # Pax's steps begin where the prompt ends, or at the first token.
        step = rows.decode_lengths if self.fprop_for_prefix else rows.positions - 1
        noise = jnp.asarray(self.noise)
        return noise[jnp.clip(step, 0, len(noise) - 1), jnp.arange(shape[0])]


def noise_of(keys: np.ndarray, num_rows: int, num_candidates: int) -> np.ndarray:
    with jax.threefry_partitionable(False):
        shape = (num_rows, num_candidates)
        draw = functools.partial(jax.random.gumbel, shape=shape)
        return np.stack([draw(jax.random.wrap_key_data(key)) for key in keys])


def decoder_of(
    name: str, hparams: Mapping[str, Any], num_rows: int, keys: np.ndarray
) -> tuple[Decoder, int]:
    """Returns our decoder for Pax's settings, and how long Pax's rows are."""
    ours = BeamSearch if name.startswith("Beam") else Sample
    known = {field.name for field in dataclasses.fields(ours)}
    settings = {key: value for key, value in hparams.items() if key in known}
    settings = {"max_decode_steps": 7, "eos_id": 2, "fprop_for_prefix": True} | settings
    seqlen = settings.pop("seqlen", LONGEST)
    if not settings["fprop_for_prefix"]:
        # Pax counts the prompt's steps, but for the first token's, in max_decode_steps.
        settings["seqlen"] = min(seqlen, settings["max_decode_steps"] + 1)
    if ours is BeamSearch:
        return BeamSearch(**settings), seqlen
    settings.pop("min_decode_steps", None)  # Pax's do not heed it.
    if name.startswith("Greedy"):
        return Greedy(**settings), seqlen
    num_rows *= settings.get("num_samples", 1)
    num_candidates = settings["k"] or 13
    return PaxSample(**settings, noise=noise_of(keys, num_rows, num_candidates)), seqlen


def decode(model, weights, decoder, ids, lengths, inputs=None):
    mdl_vars = mdl_vars_from_pax(model, {f"params/{path}": w for path, w in weights.items()})

    @jax.jit
    def run(mdl_vars, ids, lengths, keys):
        return decoder(model.module(mdl_vars), ids, lengths, keys, **(inputs or {}))

    keys = jax.random.split(jax.random.key(0), len(ids))
    return jax.device_get(run(mdl_vars, ids, lengths, keys))


def assert_equals_pax(actual, expected, what):
    for name, of_pax in expected.items():
        assert actual[name].shape == of_pax.shape, f"{what} {name}"
        if np.issubdtype(of_pax.dtype, np.floating):
            np.testing.assert_allclose(
                actual[name], of_pax, atol=1e-4, rtol=1e-4, err_msg=f"{what} {name}"
            )
        else:
            np.testing.assert_array_equal(actual[name], of_pax, f"{what} {name}")


@functools.cache
def options() -> Arrays:
    return by_kind(golden_arrays("pax_options/decode.npz"))


QUICK = {"decode_beam", "decode_sample_topk"}
GOLDENS = [name for name, case in pax_cases().items() if case["kind"] == "decode"]


@pytest.mark.parametrize("name", slow_but(QUICK, GOLDENS))
def test_the_goldens_hold(name):
    case, arrays = pax_cases()[name], pax_arrays(name)
    ids, expected = arrays["in"]["ids"], arrays["out"]
    lengths = (1 - arrays["in"]["paddings"]).sum(axis=1).astype(np.int32)
    # The keys of the steps are the same in every program of Pax's.
    keys = options()["keys"][""]
    decoder, seqlen = decoder_of(case["decoder"], case["hparams"], len(ids), keys)
    model = lm(rotary=case["flags"].get("rotary", False))
    outputs = decode(model, arrays["w"], decoder, ids, lengths)
    length = None if decoder.fprop_for_prefix else seqlen
    actual = pax_outputs(decoder, ids, lengths, outputs, seqlen=length)
    assert_equals_pax(actual, expected, name)


CASES = json.loads(str(options()["cases"][""]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_further_settings_give_what_pax_gives(name):
    case, arrays = CASES[name], options()
    ids, lengths = arrays["in"]["ids"], arrays["in"]["prefix_lengths"]
    decoder, seqlen = decoder_of(case["decoder"], case["hparams"], len(ids), arrays["keys"][""])
    inputs = {key: jnp.asarray(value) for key, value in case["inputs"].items()}
    outputs = decode(lm(), arrays["w"], decoder, ids, lengths, inputs)
    length = None if decoder.fprop_for_prefix else seqlen
    actual = pax_outputs(decoder, ids, lengths, outputs, seqlen=length)
    expected = {
        key.removeprefix(f"{name}/"): value
        for key, value in arrays["out"].items()
        if key.startswith(f"{name}/")
    }
    assert set(expected) >= {"output_ids", "decode_lengths", "logprobs"}
    assert_equals_pax(actual, expected, name)
