"""Elastic jobs, which continue when processes die, hang, leave or come back.

A supervisor on each host runs a worker process, which trains. Through files in the job's directory,
the supervisors agree on generations: sets of members that train together. Supervisors never touch a
model or an array.
"""
