"""A fixture for all tests of this folder."""

from tests.one_thread import one_thread  # noqa: F401  their tensors are tiny
