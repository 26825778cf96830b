"""Is a job as its certificate says? Its facts as a document, which others make again.

Knows the files of a job, and its data made again; never trains, and needs no accelerator.
"""
