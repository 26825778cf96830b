"""`orbax.checkpoint.v1` under the names that its releases give it, to write checkpoints with."""

import warnings

import tensorstore as ts
from orbax.checkpoint.experimental import v1 as _v1


class v1:  # noqa: N801
    """Stands for the module."""

    @staticmethod
    def save(path, tree, **saving):
        """Saves a tree; `saving` are settings of arrays, as `use_ocdbt`."""
        arrays = _v1.options.ArrayOptions
        with _quiet(), _v1.Context(array_options=arrays(saving=arrays.Saving(**saving))):
            (getattr(_v1, "save", None) or _v1.save_pytree)(path, tree)

    @staticmethod
    def save_checkpointables(path, trees):
        with _quiet():
            _v1.save_checkpointables(path, trees)

    class Training:
        def __init__(self, folder):
            with _quiet():
                self._checkpointer = _v1.training.Checkpointer(folder)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._checkpointer.close()

        def save(self, step, tree):
            with _quiet():
                save = getattr(self._checkpointer, "save", None) or self._checkpointer.save_pytree
                save(step, tree)


class _quiet(warnings.catch_warnings):  # noqa: N801
    """Orbax warns of its own names that go; which are there depends on the release."""

    def __enter__(self):
        result = super().__enter__()
        warnings.simplefilter("ignore")
        return result


def zarr_json(shape, shard, inner):
    """Returns the metadata of an array of float32 as Orbax writes it, but for the inner chunks."""
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
    sharding = {
        "chunk_shape": inner,
        "codecs": [little, zstd],
        "index_codecs": [little, {"name": "crc32c"}],
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0.0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def write_sharded(folder, x, shard, inner):
    """Writes an array "a" into a database in `folder`."""
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": "a/"}
    metadata = zarr_json([*x.shape], shard, inner)
    metadata.pop("zarr_format"), metadata.pop("node_type")
    spec = {"driver": "zarr3", "kvstore": kvstore, "metadata": metadata}
    ts.open(spec, create=True).result().write(x).result()
