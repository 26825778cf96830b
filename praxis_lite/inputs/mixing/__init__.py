"""The order of rows: shuffled, and mixed from several pipelines."""
