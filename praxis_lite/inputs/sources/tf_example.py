"""Parses a serialized tf.train.Example without tensorflow."""

import functools
from typing import Any

import numpy as np

_LISTS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}


def tf_example(record: bytes) -> dict[str, Any]:
    """Parses a serialized tf.train.Example.

    Args:
      record: The serialized message.

    Returns:
      The features, keyed by name. Numbers are int64 or float32 arrays. A bytes feature is bytes if
      it has exactly one value, and a list of bytes otherwise.

    Raises:
      google.protobuf.message.DecodeError: The bytes are not a tf.train.Example.
    """
    features: dict[str, Any] = {}
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
    """Builds the message class defined by tensorflow's example.proto and feature.proto."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )

    def add_message(messages: Any, name: str, *fields: tuple[str, int | str, bool]) -> Any:
        message = messages.add(name=name)
        for number, (name, kind, is_repeated) in enumerate(fields, 1):
            label = field.LABEL_REPEATED if is_repeated else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                message.field.add(
                    name=name,
                    number=number,
                    label=label,
                    type=field.TYPE_MESSAGE,
                    type_name=f".tensorflow.{kind}",
                )
            else:
                message.field.add(name=name, number=number, label=label, type=kind)
        return message

    add_message(file.message_type, "BytesList", ("value", field.TYPE_BYTES, True))
    add_message(file.message_type, "FloatList", ("value", field.TYPE_FLOAT, True))
    add_message(file.message_type, "Int64List", ("value", field.TYPE_INT64, True))
    feature = add_message(
        file.message_type, "Feature", *((name, kind, False) for name, kind in _LISTS.items())
    )
    feature.oneof_decl.add(name="kind")
    for list_field in feature.field:
        list_field.oneof_index = 0
    # `map<string, Feature>` is declared as a repeated message with a key and a value.
    features = add_message(
        file.message_type, "Features", ("feature", "Features.FeatureEntry", True)
    )
    entry = add_message(
        features.nested_type,
        "FeatureEntry",
        ("key", field.TYPE_STRING, False),
        ("value", "Feature", False),
    )
    entry.options.map_entry = True
    add_message(file.message_type, "Example", ("features", "Features", False))
    # Use a separate pool, because tensorflow registers the same names in the default pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))
