"""The shared experts' products in a TPU's program, which run while tokens are exchanged."""

import pytest

from tests.support.on_tpu import needs_libtpu, printed_by


@pytest.mark.nightly
@needs_libtpu
def test_shared_experts_are_computed_while_tokens_are_exchanged():
    exchanges = printed_by("tests.support.exchange_runs")
    # Rows and their experts there, outputs back; and backward besides the gates and gradients.
    assert len(exchanges) == 3 + 6
    shared = [[name for name in products if "shared_experts" in name] for products in exchanges]
    forward = [names for names in shared if any("transpose(jvp" not in name for name in names)]
    backward = [names for names in shared if any("transpose(jvp" in name for name in names)]
    assert len(forward) >= 2 and len(backward) >= 2
