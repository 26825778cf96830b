"""Elastic jobs, which continue when their processes die, hang, leave and come back.

A supervisor on each host runs a worker, which trains; the supervisors agree, through files in the
job's directory, on generations: who takes part, from where. Never sees a model or an array.
"""
