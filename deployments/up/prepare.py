"""`python -m deployments.up.prepare`: tables, first key, pools and deployments, once the servers are there.

A process of its own, so that `smi up` stays small. Prints one JSON object: the key that was made, if any.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from blocks.settings import load_settings
from deployments.up import prefect_server

WAIT_S = 120


async def prepare(new_key: bool) -> None:
    import deployments.pools as pools
    from deployments.api import keys
    from deployments.database import create_tables, engine_for

    settings = load_settings()
    engine = engine_for(settings)
    try:
        await create_tables(engine)
        key = await keys.first_key(engine)
        if key is None and new_key:
            key = await keys.new_key(engine, time.strftime("new-%Y-%m-%d"))
    finally:
        await engine.dispose()
    async with asyncio.timeout(WAIT_S):
        while not await prefect_server.answers(settings):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await pools.ensure_pools(settings)
    await pools.ensure_deployments(settings)
    sys.stdout.write(json.dumps({"key": key}))


if __name__ == "__main__":
    asyncio.run(prepare("--new-key" in sys.argv[1:]))
