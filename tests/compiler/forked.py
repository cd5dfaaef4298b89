"""Child processes by fork: they start in milliseconds and see what the test has patched."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable


class Forked:
    """A child that runs ``function`` and hands back what it returned or raised, its standard error and its warnings."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._end, begin = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(self._end)
                self._run(function, begin)
            finally:
                os._exit(1)  # nothing of the test runner may go on in the child
        os.close(begin)
        self._text = b""

    def _run(self, function: Callable[[], object], begin: int) -> None:
        sys.stderr = io.StringIO()
        report: dict[str, object] = {}
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                report["value"] = function()
        except BaseException as error:
            report.update(error=type(error).__name__, message=str(error))
        report.update(stderr=sys.stderr.getvalue(), warnings=[str(one.message) for one in caught])
        with os.fdopen(begin, "wb") as pipe:
            pipe.write(json.dumps(report).encode())
        os._exit(0)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL the child is waited for."""
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            os.waitpid(self.pid, 0)
            os.close(self._end)

    def result(self, timeout: float = 30.0) -> dict:
        """Wait for the child and return its report."""
        while True:
            if not select.select([self._end], [], [], timeout)[0]:
                self.kill()
                raise AssertionError(f"the child did not end within {timeout} s")
            block = os.read(self._end, 1 << 16)
            if not block:
                break
            self._text += block
        os.close(self._end)
        os.waitpid(self.pid, 0)
        assert self._text, "the child ended without a report"
        return json.loads(self._text)


def built(artifact) -> dict[str, str]:
    """What a child tells of an artifact."""
    return {
        "origin": artifact.origin,
        "library": str(artifact.library),
        "sha256": artifact.sha256,
        "build_key": artifact.build_key,
    }
