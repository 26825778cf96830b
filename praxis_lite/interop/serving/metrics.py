"""Numbers of a server in Prometheus' text format."""

import collections

from praxis_lite.interop.serving.engine import Engine

_PREFIX = "praxis_lite_serve"


class Metrics:
    """Counts answers, and tells them beside the engine's numbers."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._answers: collections.Counter[tuple[str, int]] = collections.Counter()

    def count(self, path: str, status: int) -> None:
        """Adds an answer."""
        self._answers[path, status] += 1

    def text(self) -> str:
        """Returns all of them, now."""
        engine = self._engine
        numbers = {
            "rows": ("gauge", engine.num_rows), "rows_taken": ("gauge", engine.num_in_rows),
            "answers_waiting": ("gauge", engine.num_waiting),
            "prompts_total": ("counter", engine.num_prompts),
            "tokens_total": ("counter", engine.num_tokens),
        }
        lines = []
        for name, (kind, value) in numbers.items():
            lines += [f"# TYPE {_PREFIX}_{name} {kind}", f"{_PREFIX}_{name} {value}"]
        lines.append(f"# TYPE {_PREFIX}_answers_total counter")
        lines += [
            f'{_PREFIX}_answers_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._answers.items())
        ]
        return "\n".join(lines) + "\n"
