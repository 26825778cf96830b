"""Compares the decoding speed of a Hugging Face Llama in this library and in transformers.

`python benchmarks/decoding.py --peer_python=PYTHON`, where PYTHON is an interpreter with torch and
transformers, writes a Llama with 12 layers and 134 M random weights. It continues prompts of 32
tokens greedily, with `huggingface.load(directory).generate` (ours) and with transformers'
`AutoModelForCausalLM.generate`, in `--dtype`. Our weights are stored in `--weights_dtype`,
optionally with `--outputs_first`. Both use the same cores or the same GPU. `--mesh 2,2` shards our
model over devices along data and mdl (simulated on a CPU); `--layers` and `--dims` set the model's
size.

Tokens per second exclude the first token, whose time includes the prefill. As a reference for the
memory bandwidth, the script also multiplies matrices of the same sizes by one row, and prints the
fraction of this bandwidth that decoding achieves. It also prints our compile time, and whether both
libraries chose the same tokens. Without --peer_python, only our library is measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NUM_PROMPT, NUM_NEW, VOCAB, DIMS, NUM_LAYERS = 32, 33, 32000, 768, 12
GOALS = {1: 1.0, 32: 1.5}
REPEATS = 3

Generate = Callable[..., list[list[int]]]


class Setup(NamedTuple):
    """A model, its dtypes and its mesh."""

    dtype: str
    weights_dtype: str | None
    outputs_first: bool
    mesh: tuple[int, int]
    dims: int
    layers: int

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layers."""
        return -(-self.dims * 8 // 3 // 256) * 256

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the weights that are read per token: all matrices except the embedding."""
        size = {"int8": 1}.get(self.weights_dtype, 2 if self.dtype == "bfloat16" else 4)
        matrices = self.layers * (4 * self.dims**2 + 3 * self.dims * self.hidden)
        return size * (matrices + self.dims * VOCAB)


def write_llama(directory: Path, setup: Setup) -> None:
    """Writes config.json and random weights with transformers' standard deviation of 0.02."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    dims, hidden, layers = setup.dims, setup.hidden, setup.layers
    dtype = {"bfloat16": ml_dtypes.bfloat16}.get(setup.dtype, np.float32)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dims,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "num_attention_heads": dims // 64,
        "num_key_value_heads": dims // 64,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "dtype": setup.dtype,
    }
    (directory / "config.json").write_text(json.dumps(config))
    square, up = (dims, dims), (hidden, dims)
    layer = {
        **{f"self_attn.{name}_proj": square for name in "qkvo"},
        "mlp.gate_proj": up,
        "mlp.up_proj": up,
        "mlp.down_proj": (dims, hidden),
        "input_layernorm": (dims,),
        "post_attention_layernorm": (dims,),
    }
    shapes = {
        "model.embed_tokens.weight": (VOCAB, dims),
        "lm_head.weight": (VOCAB, dims),
        "model.norm.weight": (dims,),
        **{
            f"model.layers.{i}.{name}.weight": shape
            for i in range(layers)
            for name, shape in layer.items()
        },
    }
    rng = np.random.default_rng(0)
    save_file(
        {
            name: (0.02 * rng.standard_normal(shape, np.float32)).astype(dtype)
            if len(shape) == 2
            else np.ones(shape, dtype)
            for name, shape in shapes.items()
        },
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )


def ours(directory: str, setup: Setup) -> tuple[Generate, float]:
    """Returns our `generate`, and the bandwidth in bytes/s when multiplying separate matrices."""
    import jax
    import jax.numpy as jnp

    from praxis_lite import huggingface
    from praxis_lite.core import MeshConfig, make_mesh

    settings = [f"task.model.fprop_dtype={setup.dtype}"]
    settings.append(f"task.decoder.weights_outputs_first={setup.outputs_first}")
    if setup.weights_dtype:
        settings.append(f"task.decoder.weights_dtype={setup.weights_dtype}")
    mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, *setup.mesh), allow_unused_devices=True))
    model = huggingface.load(directory, mesh, settings=settings, note=lambda line: None)
    dims, hidden, dtype = setup.dims, setup.hidden, jnp.dtype(setup.dtype)
    num_matrices = VOCAB // hidden + 4 * setup.layers
    matrices = [jnp.ones((dims, hidden), dtype) + i for i in range(num_matrices)]

    def products(matrices: list[jax.Array], x: jax.Array) -> jax.Array:
        for i, w in enumerate(matrices):
            x = x @ (w if i % 2 == 0 else w.T) * 1e-3
        return x

    run, x = jax.jit(products), jnp.ones((1, dims), dtype)
    seconds = min(seconds_of(lambda: jax.block_until_ready(run(matrices, x))) for _ in range(5))
    return model.generate, sum(w.nbytes for w in matrices) / seconds


def theirs(directory: str, setup: Setup) -> tuple[Generate, float]:
    """Returns a `generate` function that uses transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, setup.dtype)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval().to(device)
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        with torch.inference_mode():
            result = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                pad_token_id=0,
            )
        return result[:, ids.shape[1] :].tolist()

    return generate, 0.0


def seconds_of(call: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def work(directory: str, kind: str, setup: Setup) -> None:
    """Serves requests from stdin, one per line: prompts and numbers of new tokens."""
    out = sys.stdout
    sys.stdout = sys.stderr
    generate, bandwidth = {"ours": ours, "theirs": theirs}[kind](directory, setup)
    print(json.dumps({"bandwidth": bandwidth}), file=out, flush=True)
    for line in sys.stdin:
        prompts, num_new, settings = json.loads(line)
        began = time.perf_counter()
        ids = generate(prompts, num_new, **settings)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "ids": ids}), file=out, flush=True)


class Worker:
    """A process that generates tokens on a subset of the cores."""

    def __init__(self, python: str, kind: str, directory: str, setup: Setup, num_threads: int):
        cores = sorted(os.sched_getaffinity(0))[:num_threads]
        num_devices = setup.mesh[0] * setup.mesh[1]
        simulated = f"--xla_force_host_platform_device_count={num_devices}"
        given = ["--worker", kind, "--directory", directory, "--setup", json.dumps(setup)]
        self._process = subprocess.Popen(
            [python, __file__, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {simulated}"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.bandwidth = json.loads(self._process.stdout.readline())["bandwidth"]

    def generate(
        self, prompts: list[list[int]], num_new: int, **settings: int
    ) -> tuple[float, list[list[int]]]:
        """Returns the elapsed seconds and the tokens generated for each prompt."""
        print(json.dumps([prompts, num_new, settings]), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return answer["seconds"], answer["ids"]

    def end(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def measure(workers: dict[str, Worker], setup: Setup, batch: int) -> None:
    """Prints the results of each worker for a batch of prompts."""
    import numpy as np

    rng = np.random.default_rng(batch)
    prompts = rng.integers(3, VOCAB, (batch, NUM_PROMPT)).tolist()
    first, total, tokens = {}, {}, {}
    cold = {kind: worker.generate(prompts, NUM_NEW)[0] for kind, worker in workers.items()}
    for worker in workers.values():
        worker.generate(prompts, 1)
    for _ in range(REPEATS):
        for kind, worker in workers.items():
            first[kind] = min(first.get(kind, 1e9), worker.generate(prompts, 1)[0])
            seconds, tokens[kind] = worker.generate(prompts, NUM_NEW)
            total[kind] = min(total.get(kind, 1e9), seconds)
    rate = {kind: batch * (NUM_NEW - 1) / (total[kind] - first[kind]) for kind in workers}
    share = setup.bytes_per_token * rate["ours"] / batch / workers["ours"].bandwidth
    line = (
        f"batch {batch:<4}{rate['ours']:>9.1f} tokens/s, first after {first['ours']:.3f} s, "
        f"{cold['ours'] - total['ours']:.1f} s to compile, {share:.2f} of the bandwidth"
    )
    if "theirs" in workers:
        same = np.mean(np.asarray(tokens["ours"]) == np.asarray(tokens["theirs"]))
        ratio, goal = rate["ours"] / rate["theirs"], GOALS.get(batch, "")
        line += (
            f" | transformers {rate['theirs']:.1f}, {first['theirs']:.3f} s | ratio {ratio:.2f} "
            f"(goal {goal}), {same:.0%} of the tokens are the same"
        )
    print(line, flush=True)


def main() -> None:
    """Prints the results for each batch size and number of threads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer_python", help="an interpreter with torch and transformers")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--weights_dtype", choices=["activations", "int8"])
    parser.add_argument("--outputs_first", action="store_true", help="weights_outputs_first")
    parser.add_argument("--mesh", default="1,1", help="devices along data and mdl")
    parser.add_argument("--dims", type=int, default=DIMS)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.directory, args.worker, Setup(*json.loads(args.setup)))
        return
    mesh = tuple(map(int, args.mesh.split(",")))
    setup = Setup(args.dtype, args.weights_dtype, args.outputs_first, mesh, args.dims, args.layers)
    with tempfile.TemporaryDirectory() as folder:
        write_llama(Path(folder), setup)
        for num_threads in args.threads:
            print(f"{num_threads} threads")
            workers = {"ours": Worker(sys.executable, "ours", folder, setup, num_threads)}
            if args.peer_python:
                workers["theirs"] = Worker(args.peer_python, "theirs", folder, setup, num_threads)
            for batch in args.batches:
                measure(workers, setup, batch)
            for worker in workers.values():
                worker.end()


if __name__ == "__main__":
    main()
