"""Chat: answer a conversation.

Context, judge and route come before `generate` once there is more than one tier.
"""

from __future__ import annotations

from prefect import flow

from tasks.protocol.shapes import ChatParameters
from tasks.text import Completion, generate


class ChatRequest(ChatParameters):
    """A conversation for a model, by its name or alias in the catalogue; empty: the first of its kind."""

    model: str = ""


@flow(name="chat")
async def chat(request: ChatRequest) -> Completion:
    return await generate(request.model, request)
