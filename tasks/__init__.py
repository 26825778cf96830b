"""WHAT is learned: tasks over the library's models."""

from praxis_lite.checkout import refuse

refuse(__name__)
