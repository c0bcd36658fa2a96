"""Embedding: texts in, vectors out."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from functools import partial

from blocks.errors import UpstreamFailed
from deployments.node.adapters.base import Adapter, Emit
from deployments.node.bridge import driving
from deployments.node.drivers.base import EmbeddingDriver, Vectors
from tasks.protocol.inference_pb2 import Done, Usage
from tasks.protocol.shapes import EmbeddingParameters, EmbeddingResult


class EmbeddingAdapter(Adapter[EmbeddingDriver, EmbeddingParameters]):
    """OpenAI's embeddings over any `EmbeddingDriver`. `Done.result` is an `EmbeddingResult`."""

    shape = EmbeddingParameters

    async def run(
        self, parameters: EmbeddingParameters, media: AsyncIterator[bytes], emit: Emit | None
    ) -> Done:
        import numpy

        vectors: Vectors | None = None
        async with driving(partial(self.driver.run, parameters.input, parameters.dimensions)) as items:
            async for item in items:
                vectors = item
        if vectors is None:
            raise UpstreamFailed(f"model {self.driver.model.name} gave no vectors; try again")
        values = numpy.ascontiguousarray(vectors.values, "<f4")
        encoded = base64.b64encode(values.data).decode()
        result = EmbeddingResult(dimensions=values.shape[1], vectors=encoded)
        return Done(
            finish_reason="stop",
            result=result.model_dump_json().encode(),
            usage=Usage(prompt_tokens=vectors.tokens),
        )
