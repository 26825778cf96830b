"""A server of a hand-made model whose likeliest text is known, for the tests of serving."""

import contextlib
import functools
import threading

import jax
import numpy as np

from praxis_lite.decode import Sample
from praxis_lite.decode.continuous_batching import ContinuousBatching
from praxis_lite.decode.sampling_by_row import SampleByRow
from praxis_lite.inputs.tokenizers import ByteTokenizer
from praxis_lite.inputs.tokenizers.chat_template import ChatTemplate
from praxis_tools.serve.engine import STEPS_BETWEEN_CHECKS, Engine
from praxis_tools.serve.requests import Limits
from praxis_tools.serve.served_model import ServedModel
from praxis_tools.serve.server import Running, bound_socket
from tests.decode.toy_models import Recurrent

# L tokens of a row, R rows.
L, R, NUM_IDS, END = 67, 3, 257, 256
NAME = "toy"
# Each byte is followed by the next one, most likely; no byte stands twice.
TEXT = "abc\u00e9\u20ac def\U0001f600ghijklmnopqrstuvwxyz"
CHAIN = [*TEXT.encode(), END]
TABLE = np.random.default_rng(3).normal(size=(NUM_IDS, NUM_IDS)).astype(np.float32)
TABLE[CHAIN[:-1], CHAIN[1:]] = 6.0
MODEL = Recurrent(NUM_IDS, table=TABLE)
assert len(set(CHAIN)) == len(CHAIN)


class Bytes(ByteTokenizer):
    """Bytes with a template of chats, whose prompt ends in the last message."""

    chat = ChatTemplate("{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}")


@functools.cache
def batching():
    decoder = SampleByRow(
        max_decode_steps=L - 1,
        seqlen=L,
        eos_id=END,
        num_likeliest=5,
        num_kept_steps=STEPS_BETWEEN_CHECKS,
    )
    return ContinuousBatching(decoder, lambda mdl_vars: MODEL, R, (32, L))


def model_and_engine(max_waiting=200):
    """Returns them compiled, by whichever test is first."""
    engine = Engine(batching(), None, (32, L), max_waiting)
    engine.warm_up()
    return ServedModel(NAME, Bytes(), NUM_IDS, L, (END,)), engine


@contextlib.contextmanager
def serving(engine, model, **settings):
    """Yields the endpoints of an engine; nothing is decoded unless `decoding` is entered too."""
    limits = Limits(**{"seconds": 60.0} | settings)
    with Running(model, engine, bound_socket("127.0.0.1", 0), limits) as running:
        yield running


@contextlib.contextmanager
def decoding(engine):
    """Lets an engine decode in a thread, and drains it at the end."""
    thread = threading.Thread(target=engine.run)
    thread.start()
    try:
        yield
    finally:
        engine.drain(30)
        thread.join()


def alone(prompt, seed, n=1, **settings):
    """Returns the tokens of each sample of a prompt, by Sample in a batch of that prompt alone."""
    ids = Bytes().encode_prompt(prompt)
    outputs = _program(
        Sample(
            max_decode_steps=L - len(ids),
            eos_id=END,
            k=0,
            num_samples=n,
            sort_samples=False,
            **settings,
        )
    )(ids[None], jax.random.key(seed)[None])
    return [
        outputs["output_ids"][0, sample, : outputs["decode_lengths"][0, sample]].tolist()
        for sample in range(n)
    ]


@functools.cache
def _program(decoder):
    return jax.jit(lambda ids, keys: decoder(MODEL, ids, np.asarray([ids.shape[1]]), keys))
