"""Sources, which provide random access to examples in files of many formats.

Sources do not interpret examples. The pipelines in `inputs.text` interpret them as text, and
`FromSource` interprets them as arrays.
"""
