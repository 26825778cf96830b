"""Measures the memory needed to load a Hugging Face model, in addition to the weights.

`python benchmarks/huggingface_memory.py` writes a Llama with random bfloat16 weights, and loads it
onto eight simulated devices (replica 1, data 4, mdl 2) using the preset fsdp+tensor. It prints the
peak memory minus the memory before loading and the float32 state, relative to the largest shard.
The state is in host memory, because the devices are simulated. Pages of mapped files, which the
system can drop at any time, are not counted (RssAnon in Linux).
"""

import argparse
import json
import os
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_force_host_platform_device_count=8"
)

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from praxis_lite import huggingface
from praxis_lite.core import MeshConfig, make_mesh

MB, GOAL = 1e6, 1.1


def write_llama(directory: Path, dims: int, num_layers: int) -> None:
    """Writes config.json, a safetensors file for each layer, and their index."""
    vocab, hidden = 8 * dims, 3 * dims
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": dims,
        "intermediate_size": hidden,
        "num_hidden_layers": num_layers,
        "vocab_size": vocab,
        "num_attention_heads": dims // 64,
        "num_key_value_heads": dims // 128,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(config))
    layer = {
        "self_attn.q_proj": (dims, dims),
        "self_attn.k_proj": (dims // 2, dims),
        "self_attn.v_proj": (dims // 2, dims),
        "self_attn.o_proj": (dims, dims),
        "mlp.gate_proj": (hidden, dims),
        "mlp.up_proj": (hidden, dims),
        "mlp.down_proj": (dims, hidden),
        "input_layernorm": (dims,),
        "post_attention_layernorm": (dims,),
    }
    files = [
        {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
        for i in range(num_layers)
    ]
    files.append(
        {
            "model.embed_tokens.weight": (vocab, dims),
            "lm_head.weight": (vocab, dims),
            "model.norm.weight": (dims,),
        }
    )
    rng, weight_map = np.random.default_rng(0), {}
    for number, shapes in enumerate(files):
        file = f"model-{number}.safetensors"
        tensors = {
            name: rng.random(shape, np.float32).astype(ml_dtypes.bfloat16)
            for name, shape in shapes.items()
        }
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def held() -> int:
    """Returns the anonymous memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class MostHeld:
    """Context manager that records the peak anonymous memory, sampled every millisecond."""

    def __enter__(self) -> "MostHeld":
        self.before = self.most = held()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._is_over.wait(0.001):
            self.most = max(self.most, held())

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, default=1024, help="model dims, a multiple of 128")
    parser.add_argument("--layers", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as result:
        directory = Path(result)
        write_llama(directory, options.dims, options.layers)
        mesh = make_mesh(MeshConfig(ici_mesh_shape=(1, 4, 2)))
        # Load a tiny model first, to exclude JAX's one-time setup.
        with tempfile.TemporaryDirectory() as small:
            write_llama(Path(small), 128, 1)
            huggingface.load(small, mesh, settings=["SHARDING_PRESET=fsdp+tensor"])
        with MostHeld() as memory:
            model = huggingface.load(
                directory, mesh, settings=["SHARDING_PRESET=fsdp+tensor"], note=print
            )
    shards = [x.data.nbytes for w in model.arrays.values() for x in w.addressable_shards]
    jax.block_until_ready(model.arrays)
    beyond = memory.most - memory.before - sum(shards)
    print(
        f"state {sum(shards) / MB:,.0f} MB; peak in addition to it {beyond / MB:.1f} MB, "
        f"{beyond / max(shards):.2f} of the largest shard ({max(shards) / MB:.1f} MB); "
        f"goal {GOAL}"
    )


if __name__ == "__main__":
    main()
