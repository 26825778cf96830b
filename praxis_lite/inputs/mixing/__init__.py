"""In which order rows come: shuffled, and mixed of several pipelines.

How the rows are made is the pipelines' affair.
"""
