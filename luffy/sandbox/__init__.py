"""Sandboxed Python sessions for code written by a model: no such code runs in a process of luffy."""

from luffy.sandbox.python_session import ExecutionResult, ExecutionStatus, PythonSession, Sandbox
from luffy.sandbox.start_check import open_sandbox

__all__ = ["ExecutionResult", "ExecutionStatus", "PythonSession", "Sandbox", "open_sandbox"]
