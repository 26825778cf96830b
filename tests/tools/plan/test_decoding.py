"""Plans of decoding: the token's turn and what comes before it, and the memory's limit, by hand."""

import json

import jax
import jax.numpy as jnp
import pytest

from praxis_lite.config.build import build
from praxis_lite.config.experiment_overrides import configured
from praxis_lite.experiment import registry
from praxis_tools.explain.hlo_text import parse
from praxis_tools.plan import job_plan
from praxis_tools.plan.decoding import token_loop_body
from praxis_tools.plan.topology import topology_of
from tests.support.job_runs import launch

# A vocabulary of 257 bytes; two heads of keys and values, one on each device along mdl.
LAYERS, MODEL, HIDDEN, HEADS, KV_HEADS, DIMS, NEW = 2, 24, 32, 4, 2, 8, 7
SETTINGS = [
    f"task.model.num_layers={LAYERS}",
    f"task.model.model_dims={MODEL}",
    f"task.model.hidden_dims={HIDDEN}",
    f"task.model.num_heads={HEADS}",
    f"task.model.dim_per_head={DIMS}",
    f"task.decoder.max_decode_steps={NEW}",
    "mesh.ici_mesh_shape=(1,1,2)",
    "SHARDING_PRESET=megatron",
]


@pytest.fixture(scope="module")
def plan():
    jax.devices()  # All of the suite's, or there would be two for all tests that come after.
    job = build(configured(registry.get_experiment("lm.Llama"), SETTINGS))
    return job_plan.plan_job(job, topology_of("cpu:2"), ["decode"], batch_sizes=[1, 6])


@pytest.mark.slow
def test_the_limit_is_a_devices_weights_and_cache_by_hand(plan):
    attention = 2 * MODEL * HEADS * DIMS + 2 * MODEL * KV_HEADS * DIMS
    split = LAYERS * (attention + 3 * MODEL * HIDDEN) / 2 + MODEL * 258 / 2
    whole = (2 * LAYERS + 1) * MODEL  # Norms. The table of embeddings is looked up.
    for batch_size, step in zip((1, 6), plan.steps, strict=True):
        item = step.decoding
        assert (item.batch_size, item.rows, item.max_decode_steps) == (batch_size, batch_size, NEW)
        assert item.weight_bytes == 4 * (split + whole)
        places = item.prompt_length + NEW
        assert item.cache_bytes == 4 * LAYERS * 2 * batch_size * places * DIMS * KV_HEADS / 2
        moved = item.weight_bytes + item.cache_bytes
        assert item.limit_seconds == pytest.approx(moved / plan.topology.chip.hbm_bandwidth)
        assert item.share_of_limit == pytest.approx(item.limit_seconds / step.step_seconds)
        assert item.tokens_per_second == pytest.approx(batch_size / step.step_seconds)
        assert step.tokens_per_second == pytest.approx(item.tokens_per_second / 2)
        assert step.unit == "tokens"


@pytest.mark.slow
def test_a_token_is_a_turn_and_the_prompt_goes_before_it(plan):
    first, second = plan.steps
    # A token's products are those of the model for a row; a prompt's are as many times its length.
    weights = first.decoding.weight_bytes / 4 - (2 * LAYERS + 1) * MODEL
    attended = 2 * LAYERS * (first.decoding.prompt_length + NEW) * HEADS * DIMS / 2
    assert first.flops_per_device == 2 * (weights + attended)
    assert second.flops_per_device == 6 * first.flops_per_device
    # The prompt's are not a token's, and more with more rows.
    waits = [step.decoding.first_token_seconds for step in plan.steps]
    assert first.step_seconds < waits[0] < waits[1] / 2


@pytest.mark.slow
def test_the_text_has_a_line_per_batch_and_json_the_same_figures(plan):
    *_, one, six = plan.text.splitlines()
    assert one.split()[0] == "1" and six.split()[0] == "6"
    assert f"{plan.steps[1].decoding.tokens_per_second:,.0f}" in six
    record = json.loads(plan.json_text())
    assert record["decoding"]["batch_size"] == 1
    assert record["other_steps"][0]["decoding"]["rows"] == 6


def test_the_token_loop_body_is_the_one_whose_end_is_not_known():
    def decoded(x):
        x = jax.lax.fori_loop(0, 5, lambda i, x: jnp.sin(x), x)
        return jax.lax.while_loop(lambda x: jnp.all(x < 2.0), lambda x: x + 1.0, x)

    program = parse(jax.jit(decoded).lower(jnp.zeros(3)).compile())
    assert "while/body/add" in str(program.computations[token_loop_body(program)])
    assert token_loop_body(parse(jax.jit(jnp.sin).lower(1.0).compile())) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch_sizes=1,8"], "--batch_sizes=1,8 requires --steps=decode"),
        (["--steps=decode", "--batch_sizes=0,8"], "'0,8'"),
        (["--batch_size=8"], "--batch_sizes"),
    ],
)
def test_batch_sizes_are_numbers_of_prompts_to_decode(words, said):
    done = launch("--mode=plan", "--exp=lm.Llama", "--topology=cpu:8", *words)
    assert done.code == 2, done
    assert said in " ".join(done.err.split())
