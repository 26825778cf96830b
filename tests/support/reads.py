"""What a test's own thread reads of files."""

import os
import threading


def counted_reads(monkeypatch):
    """Returns a list that grows by (start, size) with each `os.pread` of the calling thread.

    Threads of an earlier test may not be over yet.
    """
    actual, pread, here = [], os.pread, threading.get_ident()

    def counted(file, size, start):
        if threading.get_ident() == here:
            actual.append((start, size))
        return pread(file, size, start)

    monkeypatch.setattr(os, "pread", counted)
    return actual
