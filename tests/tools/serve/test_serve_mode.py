"""`--mode=serve` as a process: 100 clients at once, a model of Hugging Face, a job, SIGTERM."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import types

import fiddle as fdl
import jax
import numpy as np
import openai
import pytest

from praxis_lite import huggingface
from praxis_lite.core import Partitioner
from praxis_lite.decode import Sample
from tests.support import job_runs
from tests.support.job_runs import CHECKOUT, copy_of_trained, launch
from tests.support.lm_eval_tasks import model_directory

pytestmark = pytest.mark.slow
WORDS = ["the", "sun", "is", "hill", "and", "hen", "sat", "in", "tree", "rat", "ran", "sea", "tea"]
LENGTH = 96
NUM_LAST = 56  # Answers that run when the server is ended: eight for each of its rows.


@contextlib.contextmanager
def server(*options):
    """Yields the process, its URL and the lines of its output; SIGTERM ends it with 0."""
    command = [sys.executable, CHECKOUT / "main.py", "--mode=serve", "--port=0", *options]
    path = os.pathsep.join(map(str, (CHECKOUT, job_runs.home())))
    environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        lines = []
        try:
            for line in process.stdout:
                lines.append(line)
                if found := re.search(r" ready: (http://127.0.0.1:\d+)/v1 ", line):
                    break
            else:
                raise AssertionError("".join(lines))
            reader = threading.Thread(target=lambda: lines.extend(process.stdout))
            reader.start()
            yield process, found[1], lines
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "".join(lines)
            reader.join()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("hf"), "llama")


def requests(count):
    rng = np.random.default_rng(0)
    for number in range(count):
        prompt = " ".join(rng.choice(WORDS, rng.integers(1, 16)))
        temperature, top_p = ((0.0, 1.0), (0.7, 0.8), (1.2, 1.0))[number % 3]
        yield {
            "prompt": prompt,
            "temperature": temperature,
            "seed": 1000 + number,
            "top_p": top_p,
            "max_tokens": int(rng.integers(1, 40)),
        }


def alone(model, given):
    """Returns the text of a request by Sample in a batch of it alone, of the model loaded here."""
    tokenizer = model.partitioner.task.tokenizer
    ids = tokenizer.encode_prompt(given["prompt"])
    decoder = fdl.Config(
        Sample, max_decode_steps=40, k=0, p=given["top_p"], temperature=given["temperature"]
    )
    task = fdl.build(fdl.copy_with(model.experiment.task, decoder=decoder))
    partitioner = Partitioner(task, model.partitioner.mesh)

    def decoded(mdl_vars, ids, length, key, most):
        return task.decoder(
            task.module(mdl_vars), ids, length, key, per_example_max_decode_steps=most
        )

    if str(decoder) not in PROGRAMS:
        PROGRAMS[str(decoder)] = jax.jit(partitioner.with_mdl_vars(decoded))
    outputs = PROGRAMS[str(decoder)](
        model.mdl_vars,
        np.pad(ids, (0, 64 - len(ids)))[None],
        np.asarray([len(ids)]),
        jax.random.key(given["seed"])[None],
        np.asarray([given["max_tokens"]]),
    )
    new = outputs["output_ids"][0, 0, : int(outputs["decode_lengths"][0, 0])]
    return tokenizer.decode(np.asarray(new), skip_special_tokens=True)


PROGRAMS = {}


async def answers_of(url, asked, num_leaving):
    """Returns the texts of requests that are made at once, next to clients that leave."""
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:

        async def whole(given):
            answer = await client.completions.create(model="tiny", **given)
            return answer.choices[0].text

        async def streamed(given):
            pieces = await client.completions.create(model="tiny", stream=True, **given)
            return "".join([piece.choices[0].text async for piece in pieces])

        async def leaves(given):
            pieces = await client.completions.create(
                model="tiny", stream=True, **{**given, "max_tokens": 60, "temperature": 2.0}
            )
            async for _ in pieces:
                break
            await pieces.close()

        async def hangs_up(given):
            with contextlib.suppress(TimeoutError, openai.APIError):
                await asyncio.wait_for(whole({**given, "max_tokens": 60}), 0.05)

        return await asyncio.gather(
            *((whole, streamed)[number % 2](given) for number, given in enumerate(asked)),
            *((leaves, hangs_up)[number % 2](asked[number]) for number in range(num_leaving)),
        )


@pytest.fixture(scope="module")
def served(directory):
    """A server that is asked by fifty clients and then ended; what they saw of it."""
    asked = list(requests(50))
    with (
        server(
            f"--hf={directory}", "--model_name=tiny", f"--max_length={LENGTH}", "--num_rows=7"
        ) as (process, url, lines),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answers = asyncio.run(answers_of(url, asked, num_leaving=10))
        again = client.completions.create(model="tiny", **asked[4]).choices[0].text
        pieces = client.completions.create(
            model="tiny",
            prompt="the",
            max_tokens=80,
            temperature=2.0,
            stream=True,
            n=NUM_LAST,
            seed=3,
        )
        chunks = [next(pieces)]
        process.send_signal(signal.SIGTERM)
        while not any("SIGTERM" in line for line in lines):
            chunks.append(next(pieces))
        with pytest.raises(openai.InternalServerError, match="shutting down") as error:
            client.completions.create(model="tiny", prompt="the")
        chunks += pieces
        status = process.wait(60)
    return types.SimpleNamespace(
        asked=asked,
        answers=answers[: len(asked)],
        again=again,
        chunks=chunks,
        lines=lines,
        refused=error.value.status_code,
        status=status,
    )


def test_fifty_clients_at_once_each_get_what_they_would_get_alone(served, directory):
    assert served.again == served.answers[4]
    model = huggingface.load(directory)
    assert served.answers == [alone(model, given) for given in served.asked]
    assert len(set(served.answers)) > 40
    assert not any("Traceback" in line for line in served.lines), "".join(served.lines)


def test_sigterm_lets_answers_end_and_refuses_the_next(served):
    assert any("SIGTERM: no new requests" in line for line in served.lines)
    assert (served.refused, served.status) == (503, 0)
    ended = [c.choices[0].index for c in served.chunks if c.choices[0].finish_reason]
    assert sorted(ended) == list(range(NUM_LAST)), "an answer was lost"


def test_a_jobs_model_is_served_as_it_decodes(tmp_path):
    job = copy_of_trained(tmp_path / "job")
    decoded = launch("--mode=decode", f"--job_log_dir={job.path}", "--prompt", "The ")
    options = (
        f"--job_log_dir={job.path}",
        "--packages=jobzoo",
        "--max_length=40",
        "--num_rows=2",
        "--set",
        "task.decoder.num_speculative_tokens=3",
    )
    with (
        server(*options) as (_, url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        answer = client.completions.create(
            model="job", prompt="The ", max_tokens=5, temperature=0, logprobs=1
        )
        chosen = answer.choices[0].logprobs
        # Greedy: the likeliest token is the one that was made, drafts or not.
        assert [max(likeliest, key=likeliest.get) for likeliest in chosen.top_logprobs] == (
            chosen.tokens
        )
    assert answer.choices[0].text in decoded.out


@pytest.mark.parametrize("options, words", [
    ([], "exactly one of JOB (--job_log_dir=JOB) and --hf=DIR"),
    (["--hf=nowhere", "--port=0"], "nowhere"),
    (["--hf=x", "--step=3"], "--step only applies to a job"),
    (["--hf=x", "--port=70000"], "--port is 70000"),
    (["--hf=x", "--request_seconds=0"], "--request_seconds is 0.0"),
])  # fmt: skip
def test_a_wrong_option_is_an_error_in_words(options, words):
    done = launch("--mode=serve", *options)
    assert done.code == 2 and words in " ".join(done.err.split()), done.err
