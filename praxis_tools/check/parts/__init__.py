"""Comparisons on a mesh, a part of a check each: data, training, properties, resuming."""
