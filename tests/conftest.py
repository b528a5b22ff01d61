"""What all tests share: the lines at the end of a run that say what was skipped, and hypothesis without a deadline."""

from hypothesis import settings
from skipped_tests import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

settings.register_profile("patient", deadline=None)  # a loaded machine is no failure
settings.load_profile("patient")
