"""What a plan counts in tokamax's kernels, in the programs that a TPU's compiler makes of them."""

import functools

import pytest

from tests.support import tokamax_runs as runs
from tests.support.marks import needs_tokamax
from tests.support.on_tpu import needs_libtpu, printed_by

pytestmark = [pytest.mark.slow, needs_libtpu, needs_tokamax]
programs = functools.cache(lambda: printed_by(runs.__name__))


def test_products_of_attention_are_two_forward_and_five_backward():
    attention, _ = programs()
    # Of the 6 x 6 blocks of 512 those below the diagonal, and on it.
    product = 2 * runs.B * runs.N * runs.T**2 * runs.K * 21 / 36
    expected = {"splash_mha_fwd_residuals": (2, 2), "splash_mha_dkv_no_residuals": (5, 4)}
    assert set(attention) == set(expected)
    for name, (products, of_model) in expected.items():
        flops, of_the_model, _ = attention[name]
        assert flops == pytest.approx(products * product, rel=1e-5)
        assert of_the_model == pytest.approx(of_model * product, rel=1e-5)


def test_products_and_tiles_of_experts_are_those_of_the_rows_that_are_someones():
    _, experts = programs()
    product = 2 * runs.ROWS / 2 * runs.INPUTS * runs.OUTPUTS
    # Two tiles of 512 rows and three that two experts share, of which half are someone's; 1,408
    # inputs are two tiles of 1,024, the outputs one of 256.
    expected = {
        "gmm_megablox": (512, 1024, 256),
        "gmm_megablox_transpose_rhs": (512, 256, 1024),
        "tgmm_megablox": (512, 1024, 256),
    }
    assert set(experts) == set(expected)
    for name, (rows, inputs, outputs) in expected.items():
        flops, of_the_model, (count, of_a_tile, _) = experts[name]
        assert flops == of_the_model == pytest.approx(product, rel=1e-5)
        assert (count, of_a_tile) == (0.5 * 5 * 2, 2 * rows * inputs * outputs)
