"""Runs work on clients' texts in helper processes, where a crash, endless work or too much memory costs one job.

A frontend or worker (`pool.py`) starts a *fork server* (`fork_server.py`), which loads something once, such as a
tokeniser, and forks *helpers* (`helper.py`). A helper does one job at a time. A new one needs milliseconds, because a
fork shares everything that is loaded.
"""
