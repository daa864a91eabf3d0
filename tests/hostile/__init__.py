"""Hostile input, vanishing clients, long runs and overload, against a server as a user starts it.

Each module runs alone for the long mode (``python -m tests.hostile.fuzz --requests 50000``); the test suite
runs short ones. They print one JSON object with what was measured, and end with 1 when a bar is missed.
"""
