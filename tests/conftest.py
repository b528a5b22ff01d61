"""What all tests share: the lines at the end of a run that say what was skipped."""

from skipped_tests import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
