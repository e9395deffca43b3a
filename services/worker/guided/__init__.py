"""Guided answers: a client's schema, expression or grammar says which tokens may continue an answer.

Libraries that compile such texts can crash, run without end, or take all memory. So they run in helper processes
(`services/isolation`) with bounds on processor time and memory, never in the worker: a text that exceeds them costs its
own request, and nobody else's.

Here the answer of each guided request has a helper of its own (`guides.py`), which compiles the grammar and then says
for each token which may follow (`guide_work.py`, `grammar.py`). An engine that compiles grammars itself, in processes
that all its requests share, lets a helper try them first (`trials.py`, `trial_work.py`).
"""
