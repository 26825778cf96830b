"""Prints the records of a job in W&B, MLflow and TensorBoard, read with their own libraries.

    python -m tests.support.read_trackers JOB TRACKING_URI

Prints JSON. It runs in a separate process, because these libraries change global loggers and hooks.
"""

import json
import struct
import sys
from pathlib import Path


def wandb_records(path: Path):
    """Yields the records of an offline run, a log in LevelDB's format with blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # The rest of a block is padding.
            at += 2**15 - at % 2**15
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # A complete record, or its last part.
            record, parts = wandb_internal_pb2.Record.FromString(parts), b""
            yield record


def of_wandb(job: Path) -> dict:
    """Returns the ids of the runs, the points by metric, the config and the names of images."""
    ids, points, config, files = set(), {}, {}, []
    paths = sorted(job.glob("wandb/offline-run-*/run-*.wandb"))
    for path in paths:
        for record in wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
            if kind == "config":
                for item in record.config.update:
                    config[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if kind == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                for name, value in values.items():
                    points.setdefault(name, []).append((values.get("step"), value))
        files += [str(file.name) for file in path.parent.rglob("*.png")]
    return {
        "launches": len(paths),
        "ids": sorted(ids),
        "points": points,
        "config": config,
        "pictures": files,
    }


def of_mlflow(uri: str) -> dict:
    """Returns the runs, and the points by metric, params, tags and artifacts of the only run."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    runs = client.search_runs([item.experiment_id for item in client.search_experiments()])
    (run,) = runs
    histories = {
        name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics
    }
    points = {
        name: [(point.step, point.value) for point in history]
        for name, history in histories.items()
    }
    pictures = [item.path for item in client.list_artifacts(run.info.run_id, "loss_curve")]
    return {
        "points": points,
        "params": run.data.params,
        "tags": run.data.tags,
        "status": run.info.status,
        "pictures": pictures,
    }


def of_tensorboard(job: Path) -> dict:
    """Returns the points by tag, and the steps of images."""
    # If tensorflow is installed, TensorBoard would import it, which is slow.
    sys.modules["tensorflow"] = None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(job / "tensorboard"), {"scalars": 0}).Reload()
    points = {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    return {"points": points, "pictures": [item.step for item in events.Images("loss_curve")]}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(
        json.dumps(
            {
                "wandb": of_wandb(folder),
                "mlflow": of_mlflow(sys.argv[2]),
                "tensorboard": of_tensorboard(folder),
            }
        )
    )
