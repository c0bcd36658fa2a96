"""The worker type `smi`: runs flows in its own process, where everything is imported and connected.

It differs from Prefect's own loop in four ways: it never gives up while Prefect is away; it starts a run
with two requests instead of nine; it watches its runs (a run that is cancelled, or that somebody else
has ended, is stopped here); and what it leaves behind when killed, its successor of the same name reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import httpx
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, State, StateType
from prefect.context import AsyncClientContext
from prefect.exceptions import Abort, ObjectNotFound, Pause
from prefect.flow_engine import run_flow_async
from prefect.flows import Flow
from prefect.settings import PREFECT_WORKER_QUERY_SECONDS
from prefect.states import Cancelled, Crashed
from prefect.workers.base import BaseJobConfiguration, BaseVariables, BaseWorker, BaseWorkerResult
from pydantic import Field

import flows.registry  # noqa: F401 (imported before the first run needs it)
from blocks.errors import PermissionDenied
from blocks.settings import Settings, load_settings
from blocks.storage import Storage
from deployments.jobs.stored import Stored
from deployments.node.worker_flows import Execution, flow_at, hosted
from tasks.fleet import close_fleet, current_fleet
from tasks.prefect_api import prefect_http
from tasks.principal import SYSTEM
from tasks.step import content_free

HEARTBEAT_S = 5
WATCH_S = 0.5
RETRY_S = 1.0
OPEN_STATES = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]

log = logging.getLogger("smi.worker")


class NodeVariables(BaseVariables):
    """What a pool of type `smi` says of its nodes."""

    gpu_memory_gb: int = Field(0, description="GPU memory of a node in this pool; 0 means none")


class NodeJobConfiguration(BaseJobConfiguration):
    """Nothing to configure per run: the node is there already."""

    gpu_memory_gb: int = 0


class NodeResult(BaseWorkerResult):
    """Result of a run: how it ended is in its state."""


class NodeWorker(BaseWorker[NodeJobConfiguration, NodeVariables, NodeResult]):
    """A worker on a node, named `host:port` as the node's service listens."""

    type = "smi"
    job_configuration = NodeJobConfiguration
    job_configuration_variables = NodeVariables
    _description = "Runs flows in a resident process on an SMI node."

    def __init__(self, *args: Any, settings: Settings | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{"heartbeat_interval_seconds": HEARTBEAT_S, **kwargs})
        self._settings = settings or load_settings()
        self._storage = Storage(self._settings.storage)
        self._running: dict[UUID, Execution] = {}
        self._stopping = False

    async def serve(self, stopping: asyncio.Event) -> None:
        """Work until `stopping` is set; runs that are under way then are reported as crashed."""
        stop = asyncio.create_task(stopping.wait())
        there = asyncio.create_task(self._insist(self._knock))
        await asyncio.wait({there, stop}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            there.cancel()
            return
        await current_fleet(self._settings)
        async with AsyncClientContext(), self:
            work = asyncio.create_task(self._work())
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            self._stopping = True
            stop.cancel()
            work.cancel()
            for execution in self._running.values():
                execution.stop("shutdown")
            with contextlib.suppress(asyncio.CancelledError):
                await work
        await close_fleet()

    async def _work(self) -> None:
        await self._insist(self._sync_once)
        await self._insist(self._report_leftovers)
        log.info("worker %s serves pool %s", self.name, self._work_pool_name)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(self._sync_and_initialize, HEARTBEAT_S))
            group.create_task(
                self._repeat(self.get_and_submit_flow_runs, PREFECT_WORKER_QUERY_SECONDS.value())
            )
            group.create_task(self._repeat(self._watch, WATCH_S))

    async def _knock(self) -> None:
        """Prefect's own client cannot be made while Prefect is away."""
        async with prefect_http(self._settings) as http:
            (await http.get("/health")).raise_for_status()

    async def _sync_once(self) -> None:
        if not self._has_successfully_synced:
            await self._sync_and_initialize()

    async def _repeat(self, act: Callable[[], Awaitable[Any]], interval_s: float) -> None:
        while True:
            await self._insist(act)
            await asyncio.sleep(interval_s)

    async def _insist(self, act: Callable[[], Awaitable[Any]]) -> None:
        while True:
            try:
                await act()
            except httpx.HTTPError as error:
                log.warning("Prefect does not answer (%s); trying again", type(error).__name__)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _report_leftovers(self) -> None:
        """Runs that a predecessor of this name held when it was killed."""
        left = await self.client.read_flow_runs(
            work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[self._work_pool_name])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=OPEN_STATES))
            ),
        )
        for run in left:
            if run.infrastructure_pid == self.name:
                cancelling = run.state_type == StateType.CANCELLING
                state: State[Any] = (
                    Cancelled(message="cancelled; its worker had ended")
                    if cancelling
                    else Crashed(message="the worker's process ended")
                )
                await self.client.set_flow_run_state(run.id, state, force=True)

    async def _watch(self) -> None:
        """Stop runs that are being cancelled, or that are over for everybody else.

        Asking costs one small request while runs are under way, and unlike a subscription to events it
        cannot miss one over a lost connection.
        """
        if not self._running:
            return
        ended = await self.client.read_flow_runs(
            flow_run_filter=FlowRunFilter(
                id=FlowRunFilterId(any_=list(self._running)),
                state=FlowRunFilterState(
                    type=FlowRunFilterStateType(any_=[StateType.CANCELLING, *TERMINAL_STATES])
                ),
            )
        )
        for run in ended:
            if execution := self._running.get(run.id):
                execution.stop("cancelled")

    async def run(
        self, flow_run: FlowRun, configuration: NodeJobConfiguration, task_status: Any = None
    ) -> NodeResult:
        """Run a flow in this process."""
        if task_status is not None:
            task_status.started(self.name)
        await self._execute(flow_run)
        return NodeResult(identifier=self.name, status_code=0)

    async def _submit_run(self, flow_run: FlowRun) -> None:
        """Take a scheduled run and see it through. Replaces Prefect's, which asks nine times."""
        try:
            if not self._stopping and await self._propose_pending_state(flow_run):
                await self._execute(flow_run)
        finally:
            self._submitting_flow_run_ids.discard(flow_run.id)
            self._release_limit_slot(flow_run.id)

    async def _execute(self, flow_run: FlowRun) -> None:
        execution = self._running[flow_run.id] = Execution()
        state: State[Any] | None = None
        try:
            flow, _ = await asyncio.gather(self._flow_of(flow_run), self._hold(flow_run))
            state = await run_flow_async(
                hosted(flow, execution, self._storage, self._settings.home / "prefect" / "results"),
                # For a run of a deployment the engine starts a thread with a connection of its own, to
                # see whether it is suspended, and blocks this loop until that is up. We suspend nothing.
                flow_run=flow_run.model_copy(update={"deployment_id": None}),
                parameters=flow_run.parameters,
                return_type="state",
            )
        except PermissionDenied as refusal:
            execution.refused = refusal.message
        except (httpx.HTTPError, ObjectNotFound, Abort, Pause) as error:
            log.warning("run %s: %s from Prefect", flow_run.name, type(error).__name__)
        except Exception as error:  # noqa: BLE001 (it ends this run, as crashed, and no other)
            content_free(error)
        finally:
            if state is None or not state.is_final():
                await self._settle(flow_run.id, execution.end_state())
            self._running.pop(flow_run.id, None)

    async def _hold(self, flow_run: FlowRun) -> None:
        """Say in Prefect that this worker has the run; and, of one that has no key, whose it is."""
        name = None
        suffix = f" for {SYSTEM.name}"
        if Stored.found_in(flow_run.parameters.get("request")) is None and not flow_run.name.endswith(suffix):
            name = flow_run.name + suffix
        await self.client.update_flow_run(flow_run.id, name=name, infrastructure_pid=self.name)

    async def _flow_of(self, flow_run: FlowRun) -> Flow[..., Any]:
        if flow_run.deployment_id is None:
            raise PermissionDenied("a run without a deployment is refused: it names no entrypoint")
        deployment = await self.client.read_deployment(flow_run.deployment_id)
        if deployment.pull_steps:
            raise PermissionDenied("pull steps are refused: this worker runs what is installed on its node")
        return flow_at(deployment.entrypoint)

    async def _settle(self, flow_run_id: UUID, state: State[Any]) -> None:
        """Make sure that Prefect knows that the run is over, however long it is away."""
        while True:
            try:
                run = await self.client.read_flow_run(flow_run_id)
                if run.state_type not in TERMINAL_STATES:
                    await self.client.set_flow_run_state(flow_run_id, state, force=True)
                return
            except ObjectNotFound:
                return
            except httpx.HTTPError as error:
                log.warning("run %s cannot be ended (%s); trying again", flow_run_id, type(error).__name__)
                if self._stopping:
                    return
            await asyncio.sleep(RETRY_S)
