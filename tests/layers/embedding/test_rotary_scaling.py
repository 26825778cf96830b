"""Rotary positions with scaled wavelengths, and of a part of the head, against NumPy."""

import math

import jax
import numpy as np
import pytest

from praxis_lite import ConfigError
from praxis_lite.layers import (
    DynamicRotary,
    LinearScaledRotary,
    Llama3Rotary,
    LongRope,
    ProportionalRotary,
    RotaryPositionalEmbedding,
    YarnRotary,
)

K, THETA = 14, 500.0
PLAIN = 1.0 / THETA ** (np.arange(0, K, 2) / K)  # Radians per position.
POSITIONS = np.array([[0, 1, 5, 40, 90]])
HEADS = np.random.default_rng(0).normal(size=(2, 5, 3, K)).astype(np.float32)


def turned(heads, frequencies, amplitude=1.0):
    """Returns heads as complex numbers, of which each pair is turned."""
    half = heads.shape[-1] // 2
    pairs = heads[..., :half] + 1j * heads[..., half:]
    angle = POSITIONS[:, :, None, None] * frequencies
    pairs = pairs * np.exp(1j * angle) * amplitude
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def llama3(frequency):
    factor, low, high, length = 8.0, 1.0, 4.0, 64
    wavelength = 2 * math.pi / frequency
    if wavelength > length / low:
        return frequency / factor
    if wavelength < length / high:
        return frequency
    kept = (length / wavelength - low) / (high - low)
    return (1 - kept) * frequency / factor + kept * frequency


def yarn(index):
    def pair(num_turns):
        return K * math.log(64 / (num_turns * 2 * math.pi)) / (2 * math.log(THETA))

    first, last = max(math.floor(pair(32.0)), 0), min(math.ceil(pair(1.0)), K - 1)
    slowed = min(max((index - first) / (last - first), 0.0), 1.0)
    return slowed * PLAIN[index] / 4.0 + (1 - slowed) * PLAIN[index]


SHORT, LONG = np.linspace(1.0, 2.0, K // 2), np.linspace(3.0, 9.0, K // 2)
CASES = {
    "plain": (RotaryPositionalEmbedding(K, max_timescale=THETA), PLAIN, 1.0),
    "linear": (LinearScaledRotary(K, factor=4.0, max_timescale=THETA), PLAIN / 4.0, 1.0),
    # Three of seven pairs turn, as if all did.
    "proportional": (
        ProportionalRotary(K, factor=2.0, share=0.5, max_timescale=THETA),
        np.where(np.arange(K // 2) < 3, PLAIN / 2.0, 0.0),
        1.0,
    ),
    # The last position is 90: theta is that of 91 tokens.
    "dynamic": (
        DynamicRotary(K, factor=4.0, original_max_positions=64, max_timescale=THETA),
        1.0 / (THETA * (4.0 * 91 / 64 - 3.0) ** (K / (K - 2))) ** (np.arange(0, K, 2) / K),
        1.0,
    ),
    "dynamic, short": (
        DynamicRotary(K, factor=4.0, original_max_positions=91, max_timescale=THETA),
        PLAIN,
        1.0,
    ),
    "llama3": (
        Llama3Rotary(K, max_timescale=THETA, original_max_positions=64),
        np.array([llama3(x) for x in PLAIN]),
        1.0,
    ),
    "yarn": (
        YarnRotary(K, factor=4.0, original_max_positions=64, max_timescale=THETA),
        np.array([yarn(i) for i in range(K // 2)]),
        0.1 * math.log(4.0) + 1.0,
    ),
    "long": (
        LongRope(
            K,
            short_factor=SHORT,
            long_factor=LONG,
            original_max_positions=64,
            attention_factor=1.25,
            max_timescale=THETA,
        ),
        PLAIN / LONG,
        1.25,
    ),
    "short": (
        LongRope(
            K, short_factor=SHORT, long_factor=LONG, original_max_positions=91, max_timescale=THETA
        ),
        PLAIN / SHORT,
        1.0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pairs_turn_as_the_formula_says(name):
    layer, frequencies, amplitude = CASES[name]
    actual = jax.jit(lambda *args: layer(*args))(HEADS, POSITIONS)
    expected = turned(HEADS.astype(np.float64), frequencies, amplitude)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_a_part_of_the_head_turns_and_the_rest_stays():
    layer = RotaryPositionalEmbedding(K, rotary_dims=6, max_timescale=THETA)
    actual = layer(HEADS, POSITIONS)
    frequencies = 1.0 / THETA ** (np.arange(0, 6, 2) / 6)
    np.testing.assert_allclose(actual[..., :6], turned(HEADS[..., :6], frequencies), atol=2e-5)
    np.testing.assert_array_equal(actual[..., 6:], HEADS[..., 6:])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: RotaryPositionalEmbedding(K, rotary_dims=5), "rotary_dims.*5"),
        (lambda: RotaryPositionalEmbedding(K, rotary_dims=16), "rotary_dims.*16.*14"),
        (lambda: Llama3Rotary(K, low_freq_factor=5.0), "low_freq_factor.*5.0.*high_freq"),
        (
            lambda: LongRope(K, short_factor=[1.0], long_factor=LONG, original_max_positions=9),
            "LongRope.short_factor.*1.*7",
        ),
        (
            lambda: YarnRotary(K, factor=2.0, original_max_positions=9, beta_slow=40.0),
            "beta_slow.*40.0.*beta_fast.*32.0",
        ),
        (lambda: LinearScaledRotary(K, factor=0.0), "LinearScaledRotary.factor.*0.0"),
        (lambda: ProportionalRotary(K, share=1.5), "ProportionalRotary.share.*1.5"),
        (lambda: DynamicRotary(2, factor=2.0, original_max_positions=9), "rotary_dims.*2"),
    ],
)
def test_wrong_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
