"""Several pipelines as one stream of rows, each with a share of them.

What a source's rows are, and how they are made, is the source's affair.
"""
