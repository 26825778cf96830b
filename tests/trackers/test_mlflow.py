"""What the tracker sends to MLflow's client, without MLflow."""

import collections
import time
import types
from unittest import mock

from praxis_lite.trackers.mlflow import MLflow

Metric = collections.namedtuple("Metric", "key value timestamp step")


def test_numbers_have_the_time_in_milliseconds():
    tracker, client = MLflow(), mock.Mock()
    tracker._client, tracker._id = client, "id"
    tracker._entities = types.SimpleNamespace(Metric=Metric)
    before = time.time()
    tracker.scalars(7, {"loss": 2.5, "heldout/loss": 3.5})
    (call,) = client.log_batch.call_args_list
    assert call.args == ("id",)
    sent = call.kwargs["metrics"]
    assert [(x.key, x.value, x.step) for x in sent] == [("loss", 2.5, 7), ("heldout/loss", 3.5, 7)]
    assert all(before - 1 <= x.timestamp / 1000 <= time.time() for x in sent)
