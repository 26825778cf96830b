"""Elastic jobs, which continue when processes die, hang, leave or come back.

A supervisor on each host runs a worker process that trains. The supervisors agree on generations
(sets of members that train together) through files in the job directory. Supervisors never access
models or arrays.
"""
