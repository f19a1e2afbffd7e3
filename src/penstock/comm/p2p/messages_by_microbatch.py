"""Messages of one payload from one stage to another that have arrived, or wait to be sent."""

from __future__ import annotations

from penstock.comm.core.trace_recorder import Recorder
from penstock.comm.message.tensor_message import TensorMessage
from penstock.schedule.stage_state.microbatch_state import Piece


class MessageBuffer:
    """Contents of messages of one payload from one stage to another that have arrived, or wait to be sent.

    Args:
        recorder: of the bytes that stages of one rank hand to each other; None where the stages lie on two ranks,
            whose bytes are counted with the message.
    """

    def __init__(self, recorder: Recorder | None) -> None:
        self._contents: dict[Piece, TensorMessage] = {}
        self._recorder = recorder

    def put(self, content: TensorMessage) -> None:
        """Lay a content ready."""
        header = content.header
        self._contents[header.first, header.piece] = content
        if self._recorder is not None:
            self._recorder.change("messages", content.nbytes)

    def take(self, key: Piece) -> TensorMessage:
        """Take the content of a microbatch (slice)."""
        content = self._contents.pop(key)
        if self._recorder is not None:
            self._recorder.change("messages", -content.nbytes)
        return content

    def __contains__(self, key: Piece) -> bool:
        return key in self._contents
