"""Fixtures of tests of stages."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.runtime.setup import schedule_fitter
from penstock.stage.cuda_graphs.captured_pass import CapturedPass
from penstock.stage.cuda_graphs.pass_capturer import PassCapturer
from support.recorder import CallsAgain


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CallsAgain:
    made, recording = CallsAgain(), PassCapturer._recording

    def keeping_buffers(self: PassCapturer, *given: Any) -> CapturedPass:
        """What is recorded is run, too, so buffers change."""
        buffers = [buffer for block in self._module.modules.values() for buffer in block.buffers()]
        before = [buffer.clone() for buffer in buffers]
        found = recording(self, *given)
        for buffer, content in zip(buffers, before, strict=True):
            buffer.data.copy_(content)
        return found

    monkeypatch.setattr(PassCapturer, "_recording", keeping_buffers)
    monkeypatch.setattr(schedule_fitter, "recorder_on", lambda _: made)
    return made
