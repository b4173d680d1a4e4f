"""Pure decisions of the worker: no I/O, no clock of its own. Events in, decisions out, time passed in as seconds.

It imports the standard library and `penstock.schemas` alone.
"""
