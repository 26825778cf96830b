"""The parts of a check, such as data, training, decoding and resuming."""
