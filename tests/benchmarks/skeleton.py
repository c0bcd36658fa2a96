"""The bare skeleton that SMI's API is measured against: FastAPI and one gRPC hop to a process.

No key, no validation, no record. `python skeleton.py backend SOCKET` is the process behind the hop,
`python skeleton.py api SOCKET PORT` the API in front of it. The same echo, the same servers
(uvicorn with uvloop and httptools, grpc.aio), the same wire formats as SMI's.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

METHOD = "/skeleton.Echo/"


async def echo(request: bytes, context: Any) -> bytes:
    return json.dumps({"text": json.loads(request)["messages"][-1]["content"]}).encode()


async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    body = json.loads(request)
    for word in body["messages"][-1]["content"].split(" "):
        yield word.encode()
        await asyncio.sleep(1 / body["tokens_per_second"])


async def backend(socket: str) -> None:
    server = grpc.aio.server()
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo),
        "Stream": grpc.unary_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("skeleton.Echo", handlers)])
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    await server.wait_for_termination()


def api(socket: str) -> FastAPI:
    app = FastAPI()
    channel: list[grpc.aio.Channel] = []

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        if not channel:
            channel.append(grpc.aio.insecure_channel(f"unix:{socket}"))
        body = await request.json()
        if not body.get("stream"):
            answer = json.loads(await channel[0].unary_unary(METHOD + "Unary")(json.dumps(body).encode()))
            message = {"role": "assistant", "content": answer["text"]}
            return Response(json.dumps({"choices": [{"message": message}]}), media_type="application/json")
        words = channel[0].unary_stream(METHOD + "Stream")(json.dumps(body).encode())
        return StreamingResponse(sse(words), media_type="text/event-stream")

    return app


async def sse(words: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for word in words:
        delta = {"choices": [{"delta": {"content": word.decode()}}]}
        yield f"data: {json.dumps(delta)}\n\n".encode()
    yield b"data: [DONE]\n\n"


if __name__ == "__main__":
    if sys.argv[1] == "backend":
        uvloop.run(backend(sys.argv[2]))
    else:
        uvicorn.run(api(sys.argv[2]), port=int(sys.argv[3]), log_level="warning", access_log=False)
