"""The only place that uses names that PyTorch and Lightning keep private.

A private name can change in any release. Each one is wrapped here in a function with a public name.
``tests/private_names/`` holds a contract for each name, so that a change upstream fails a test that states the
name and the installed version, instead of changing what training computes. Ruff's rule SLF001 and
``tests/test_private_uses.py`` keep private names out of all other modules.
"""
