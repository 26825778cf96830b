"""Sources: random access to examples in files of many formats, and parallel reads of all of them.

Sources do not interpret examples. Pipelines do: those in `inputs.text` for text, and `FromSource`
for arrays.
"""
