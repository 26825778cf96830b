"""Is a job what its certificate says? Its facts as one document, which others make again.

Knows the files of a job, and its data made again; never trains, and needs no accelerator.
"""
