"""Creates job directories without training, with the files that a report reads."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from praxis_lite.job.job_dir import JobDir
from praxis_lite.trainer.metrics.json_lines import json_line

LAYOUT = {
    "totals": "2 weights with 104 parameters; each device of the mesh (data 4) holds 1 KiB.",
    "arrays": [
        {
            "path": path,
            "shape": shape,
            "padded_shape": padded,
            "dtype": dtype,
            "spec": spec,
            "num_bytes": size,
        }
        for path, shape, padded, dtype, spec, size in (
            ("step", "[]", "[]", "int32", "()", 4),
            ("mdl_vars/params/w/a", "[7, 13]", "[8, 14]", "float32", "(data, mdl)", 1112),
            ("mdl_vars/params/w/b", "[13]", "[13]", "float32", "(-)", 52),
        )
    ],
}


def training_lines(num_steps: int, seed: int = 0, **others: Any) -> list[dict[str, Any]]:
    """Returns lines as written by a run, with float32 numbers; `others` are added to each line."""
    rng = np.random.default_rng(seed)

    def float32(values: np.ndarray) -> list[float]:
        return values.astype(np.float32).tolist()

    steps = np.arange(1, num_steps + 1)
    columns = {
        "loss": float32(2 + 3 / np.sqrt(steps) + rng.normal(0, 0.05, num_steps)),
        "accuracy": float32(rng.random(num_steps)),
        "grad_norm": float32(np.abs(rng.normal(1, 0.1, num_steps))),
        "learning_rate": float32(1e-3 / np.sqrt(steps)),
        "step_time": (0.5 + rng.random(num_steps) / 8).tolist(),
        "input_time": (rng.random(num_steps) / 64).tolist(),
        "dispatch_time": (rng.random(num_steps) / 32).tolist(),
        "device_time": (0.4 + rng.random(num_steps) / 8).tolist(),
        "save_time": np.where(steps % 7 == 0, 1.25, 0.0).tolist(),
        "evaluation_time": np.where(steps % 13 == 0, 2.5, 0.0).tolist(),
    }
    lines = []
    for index, step in enumerate(steps.tolist()):
        line = {name: column[index] for name, column in columns.items()}
        line |= {"tokens_per_second": 512 / line["step_time"], "num_skipped_in_a_row": 0}
        lines.append({"step": step, **line, "num_skipped_steps": 0, **others})
    return lines


def written_job(
    path: Path,
    lines: Sequence[Mapping[str, Any]] = (),
    *,
    evaluations: Sequence[Mapping[str, Any]] = (),
    settings: Sequence[str] = (),
    samples: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    layout: Any = LAYOUT,
    timeline: Sequence[Mapping[str, Any]] = (),
    experiment: str = "zoo.lm.Tiny",
    elastic: Sequence[Mapping[str, Any]] = (),
    certificates: Sequence[Mapping[str, Any]] = (),
) -> JobDir:
    """Writes a job with these files; `samples` are the records by "DATASET/STEP"."""
    job = JobDir(path)
    path.mkdir(parents=True)
    job.write_config(
        json.dumps({"experiment": experiment}), ["run.seed=7", "task.model=zoo.Lm", *settings]
    )
    if lines:
        job.metrics_jsonl.write_text("".join(map(json_line, lines)))
    if evaluations:
        job.eval_metrics_jsonl.write_text("".join(map(json_line, evaluations)))
    if layout is not None:
        job.layout_json.write_text(json.dumps(layout))
    for file, items in (
        (job.timeline_jsonl, timeline),
        (job.elastic_jsonl, elastic),
        (job.certificates_jsonl, certificates),
    ):
        if items:
            file.write_text("".join(json.dumps(item) + "\n" for item in items))
    for name, records in (samples or {}).items():
        dataset, step = name.rsplit("/", 1)
        file = job.decode_jsonl(dataset, int(step))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return job


def change_line(generation: int, kind: str, from_step: int, devices: int) -> dict[str, Any]:
    """Returns a line of elastic.jsonl with a second each for notice, agreement and first step."""
    return {
        "generation": generation,
        "time": 1e9 + 100 * generation,
        "kind": kind,
        "who": [] if kind == "start" else [3],
        "why": f"process 3 (host) {kind}",
        "members": list(range(devices)),
        "hosts": ["host"] * devices,
        "num_devices": devices,
        "mesh": {"replica": 1, "data": devices, "mdl": 1},
        "from_step": from_step,
        "source": "peers" if from_step else "new",
        "lost_steps": 2 if from_step else 0,
        "reached": True,
        "seconds": {"notice": 1.0, "agree": 1.0, "first_step": 1.0, "total": 3.0},
    }


def certificate_line(step: int, difference: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns a line of certificates.jsonl."""
    return {
        "step": step,
        "time": 1e9 + step,
        "rows": 4,
        "meshes": {"own": {"data": 4}},
        "certified": difference is None,
        "num_comparisons": 11,
        "closest": {"leaf": "mdl_vars/params/w/a", "share": step / 1000},
        "seconds": 0.25,
        "state_digest": f"{step:032x}",
        "difference": difference,
    }


def nonsense_job(path: Path, seed: int) -> JobDir:
    """Writes a job whose files contain random invalid content, determined by the seed."""
    rng = random.Random(seed)

    def value() -> Any:
        return rng.choice(
            [
                None,
                True,
                "NaN",
                "-Infinity",
                "x" * 99,
                10**400,
                -(10**400),
                1e308,
                -1e308,
                0,
                -3,
                2**53 + 1,
                0.1,
                [],
                {},
                [[1]],
                {"a": 1},
                "\ud800",
                "</script><b>",
            ]
        )

    def line() -> str:
        names = [
            "loss",
            "dataset",
            "step_time",
            "tokens_per_second",
            "save_time",
            "prompt",
            "launch",
            "num_skipped_in_a_row",
            "continuation",
            "seconds",
            "first_step",
            "last_step",
            "ended_by",
            "generation",
            "time",
            "why",
            "kind",
            "members",
            "who",
            "mesh",
            "from_step",
            "reached",
            "certified",
            "difference",
            "closest",
            "__proto__",
            "",
        ]
        item = {name: value() for name in rng.sample(names, rng.randrange(len(names)))}
        if rng.random() < 0.9:
            item["step"] = rng.choice([rng.randrange(-5, 40), 10**17, 10**400, True])
        text = json.dumps(item)
        return text[: rng.randrange(len(text))] if rng.random() < 0.1 else text

    job = written_job(path)
    files = [
        "metrics.jsonl",
        "eval_metrics.jsonl",
        "timeline.jsonl",
        "config.txt",
        "layout.json",
        "decode/x/7.jsonl",
        "decode/x/08.jsonl",
        "profiles/3/profile.txt",
        "elastic.jsonl",
        "certificates.jsonl",
    ]
    for name in rng.sample(files, 7):
        file = job.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(line() for _ in range(rng.randrange(60)))
        noise = bytes(rng.randrange(256) for _ in range(rng.choice([0, 9])))
        file.write_bytes(text.encode() + noise)
    return job
