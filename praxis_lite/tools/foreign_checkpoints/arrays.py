"""The arrays in a folder that another program wrote with Orbax, checked as those of a step are.

The folder is one OCDBT database, or has a folder of plain files for each array, all in Zarr 2 or
all in Zarr 3. There is no manifest: what an array is, its own metadata says, and an array that was
exchanged for another one of its shape is not noticed.
"""

from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.open_folder import OpenFolder
from praxis_lite.run.checkpoints.files.ocdbt import (
    DATABASE,
    StoredValue,
    kvstore_spec,
    reading_context,
    stored_values,
)
from praxis_lite.run.checkpoints.files.origin import Origin
from praxis_lite.run.checkpoints.files.step_names import regular_files
from praxis_lite.run.checkpoints.files.stored_arrays import StoredArray
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape
from praxis_lite.run.checkpoints.files.zarr_checks import (
    check_arrays,
    check_leaf,
    read_metadata,
)
from praxis_lite.run.checkpoints.files.zarr_formats import (
    ZARR_2,
    ZARR_3,
    ZarrFormat,
    np_dtype,
)

_OF_ORBAX = "array_metadatas/"


def foreign_arrays(folder: Path, origin: Origin, prefix: str = "") -> dict[str, StoredArray]:
    """Returns the arrays whose names begin with `prefix`, by path without it; decodes none.

    Raises:
      ConfigError: something in the folder is no regular file, or what is stored is not as Orbax
        writes it; for `Origin.refusing`.
    """
    files = list(regular_files(folder))
    is_database = DATABASE in files
    if is_database:
        values = stored_values(folder)
    else:
        # Files beside the arrays' folders are Orbax's own, and so is a folder.
        names = [
            name for name in files
            if name.startswith(prefix) and "/" in name and not name.startswith(_OF_ORBAX)
        ]
        values = {x: StoredValue(None, x, 0, (folder / x).lstat().st_size) for x in names}
    values = {key: value for key, value in values.items() if key.startswith(prefix)}
    is_3 = any(key.endswith(f"/{ZARR_3.metadata_file}") for key in values)
    form = ZARR_3 if is_3 else ZARR_2
    leaves, arrays, context, opened = {}, {}, reading_context(), OpenFolder(folder)
    for key, value in values.items():
        name, _, file = key.rpartition("/")
        if file == form.metadata_file:
            leaves[name] = _stored_leaf(key, read_metadata(folder, key, value), form)
            check_leaf(f"mdl_vars/{_path(name, prefix)}", leaves[name])
    check_arrays(folder, leaves, values, form)
    for name, leaf in leaves.items():
        path, shape = _path(name, prefix), tuple(leaf["shape"])
        kvstore = kvstore_spec(opened.path, f"{name}/", is_database=is_database)
        if path in arrays:
            raise ConfigError(f"two arrays have one name, {path}")
        spec = {"driver": form.driver, "kvstore": kvstore}
        arrays[path] = StoredArray(
            path, shape, shape, np_dtype(leaf["dtype"]), spec, context, origin, opened
        )
    return arrays


def _path(name: str, prefix: str) -> str:
    return name.removeprefix(prefix).replace(".", "/")


def _stored_leaf(key: str, metadata: Any, form: ZarrFormat) -> dict[str, Any]:
    """Returns the entry of a manifest that an array's own metadata amounts to: nothing is padded.

    Raises:
      ConfigError: its shape or its dtype is not one that is read.
    """
    metadata = metadata if isinstance(metadata, dict) else {}
    shape, dtype = metadata.get("shape"), form.dtype_of(metadata)
    dtypes = [ours for ours, theirs in form.dtypes.items() if theirs == dtype]
    if not is_shape(shape) or not dtypes:
        raise ConfigError(f"{key} has the shape {shape!a:.80} and the dtype {dtype!a:.80}")
    return {"shape": shape, "padded_shape": shape, "dtype": dtypes[0]}
