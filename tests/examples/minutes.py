"""A flow of your own: the minutes of a recorded talk, from SMI's steps."""

import asyncio
import sys

from prefect import flow

from blocks.storage import Recording
from tasks.audio import hear
from tasks.protocol.shapes import ChatParameters, Message, TranscriptionParameters
from tasks.text import generate


@flow
async def minutes(recording: str) -> str:
    heard = await hear("whisper-1", Recording(path=recording), TranscriptionParameters())
    order = Message(role="user", content=f"Sum this up in one sentence: {heard.text}")
    summary = await generate("smollm2-135m", ChatParameters(messages=[order], max_tokens=60))
    return f"# Minutes\n\n{summary.text}\n\n> {heard.text}"


if __name__ == "__main__":
    print(asyncio.run(minutes(sys.argv[1])))
