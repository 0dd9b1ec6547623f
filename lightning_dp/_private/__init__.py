"""The only place that uses names which PyTorch and Lightning keep private.

A private name can change in any release. Each one is wrapped here in a function with a public name, and
``tests/test_private_names.py`` checks it against the installed versions, so that a change upstream fails a test that
names it instead of changing what training computes. Ruff's rule SLF001 keeps private names out of all other modules.
"""
