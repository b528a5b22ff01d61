"""Sandboxed Python sessions for code written by a model: no such code runs in a process of luffy."""

from luffy.sandbox.bubblewrap import SandboxOfLoop, open_sandbox
from luffy.sandbox.python_session import ExecutionResult, ExecutionStatus, PythonSession, Sandbox

__all__ = ["ExecutionResult", "ExecutionStatus", "PythonSession", "Sandbox", "SandboxOfLoop", "open_sandbox"]
