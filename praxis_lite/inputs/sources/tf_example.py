"""Parses a serialized tf.train.Example without tensorflow."""

import functools
from typing import Any

import numpy as np

_LISTS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


def tf_example(record: bytes) -> dict[str, Any]:
    """Returns the features of a serialized tf.train.Example, by name.

    Numbers are arrays of int64 or float32. A single bytes value is bytes; several or none are a
    list.

    Raises:
      google.protobuf.message.DecodeError: the bytes are not a tf.train.Example.
    """
    features = {}
    for name, feature in _example_class().FromString(record).features.feature.items():
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else []
        if kind == "int64_list":
            features[name] = np.array(values, np.int64)
        elif kind == "float_list":
            features[name] = np.array(values, np.float32)
        else:
            features[name] = values[0] if len(values) == 1 else list(values)
    return features


@functools.cache
def _example_class() -> Any:
    """Returns the message as tensorflow/core/example/example.proto and feature.proto define it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )

    def message(messages: Any, name: str, *fields: tuple[str, int | str, bool]) -> Any:
        result = messages.add(name=name)
        for number, (name, kind, is_repeated) in enumerate(fields, 1):
            label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                result.field.add(
                    name=name, number=number, label=label, type=field.TYPE_MESSAGE,
                    type_name=f".tensorflow.{kind}",
                )
            else:
                result.field.add(name=name, number=number, label=label, type=kind)
        return result

    message(file.message_type, "BytesList", ("value", field.TYPE_BYTES, True))
    message(file.message_type, "FloatList", ("value", field.TYPE_FLOAT, True))
    message(file.message_type, "Int64List", ("value", field.TYPE_INT64, True))
    feature = message(
        file.message_type, "Feature", *((name, kind, False) for name, kind in _LISTS.items())
    )
    feature.oneof_decl.add(name="kind")
    for item in feature.field:
        item.oneof_index = 0
    features = message(file.message_type, "Features", ("feature", "Features.FeatureEntry", True))
    entry = message(
        features.nested_type, "FeatureEntry", ("key", field.TYPE_STRING, False),
        ("value", "Feature", False),
    )
    entry.options.map_entry = True
    message(file.message_type, "Example", ("features", "Features", False))
    # A separate pool: tensorflow, if it is loaded, has the same names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
