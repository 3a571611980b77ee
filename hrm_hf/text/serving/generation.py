"""Answers that can be stopped: what ties a request of the front to the thread in which transformers generates.

`transformers serve` runs `generate` in a thread of its own and forgets it: without streaming nothing ends it when the
client has gone or the time is over. Here every request has a `Ticket`, which reaches the handlers in a context
variable, gives `generate` a stopping criterion, and knows when the thread has really finished.
"""

import asyncio
import threading
import time
from contextvars import ContextVar
from typing import Any

import torch
from fastapi import HTTPException
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager, GenerationState


TICKET: ContextVar["Ticket | None"] = ContextVar("hrm_hf_ticket", default=None)


class Ticket:
    """One request: when it must end, why it did, and whether something of it still runs.

    Args:
        loop: that of the server. id: name of the request. seconds: most time of its answer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, id: str, seconds: float):
        self.loop, self.id, self.seconds = loop, id, seconds
        self.deadline = float("inf")
        self.gone = threading.Event()
        self.timed_out = False
        self.cancels_batch = None
        self.says_length = True  # whether the route can say that an answer was cut
        self._jobs, self._lock, self._idle = 0, threading.Lock(), asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """The request has its turn."""
        self.deadline = time.monotonic() + self.seconds

    def must_stop(self) -> bool:
        """Asked for every token, by the thread that generates."""
        self.timed_out = self.timed_out or time.monotonic() > self.deadline
        return self.timed_out or self.gone.is_set()

    def stop(self) -> None:
        """Nobody waits for the answer any more."""
        self.gone.set()
        if self.cancels_batch is not None:
            self.cancels_batch()

    def wrap(self, function):
        """A function that is about to run in a thread, counted while it waits and runs."""
        with self._lock:
            self._jobs += 1
        self._idle.clear()

        def counted(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                with self._lock:
                    self._jobs -= 1
                self.loop.call_soon_threadsafe(self._settle)

        return counted

    def _settle(self) -> None:
        if not self._jobs:
            self._idle.set()

    async def finished(self) -> None:
        """Returns when no thread works for this request."""
        await self._idle.wait()


class TicketStop(StoppingCriteria):
    """Ends `generate` when the ticket says so.

    Raises:
        TimeoutError: the time is over, and the route has no word for an answer that was cut.
    """

    def __init__(self, ticket: Ticket, generation_config):
        self.ticket, self.generation_config = ticket, generation_config

    def __call__(self, input_ids: torch.Tensor, scores, **kwargs: Any) -> torch.Tensor:
        stop = self.ticket.must_stop()
        if stop and self.ticket.timed_out:
            if not self.ticket.says_length:
                raise TimeoutError(time_is_over(self.ticket.seconds))
            # The handlers say "length" for an answer with as many tokens as this; generate has a copy of its own.
            self.generation_config.max_new_tokens = 0
        return torch.full((len(input_ids),), stop, dtype=torch.bool, device=input_ids.device)


def time_is_over(seconds: float) -> str:
    """The message for an answer that took too long."""
    return f"the answer took longer than {seconds:g} seconds (--request-seconds) and was stopped; ask for fewer tokens"


class StoppableManager(GenerateManager):
    """transformers' generation in a thread, for requests with a ticket."""

    def generate_streaming(self, model, processor, inputs, gen_config, request_id, response_parser=None):
        """As in transformers, until the ticket says stop."""
        inputs = _with_stop(inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, response_parser)

    async def generate_non_streaming(self, model, processor, inputs, gen_config, request_id):
        """As in transformers, until the ticket says stop. What a model refuses is the request's fault (400)."""
        inputs = _with_stop(inputs, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, request_id)
        except TimeoutError as error:
            raise HTTPException(504, str(error)) from error
        except ValueError as error:
            raise HTTPException(400, str(error)) from error

    def submit(self, fn, *args, **kwargs):
        """Counts the work for its ticket."""
        return super().submit(_counted(fn), *args, **kwargs)

    def async_submit(self, fn, *args, **kwargs):
        """Counts the work for its ticket. A client that leaves does not take the thread's future along."""
        return asyncio.shield(super().async_submit(_counted(fn), *args, **kwargs))


def _with_stop(inputs: dict, gen_config) -> dict:
    ticket = TICKET.get()
    if ticket is None:
        return inputs
    return {**inputs, "stopping_criteria": StoppingCriteriaList([TicketStop(ticket, gen_config)])}


def _counted(function):
    ticket = TICKET.get()
    return function if ticket is None else ticket.wrap(function)


def make_stoppable(state: GenerationState) -> None:
    """Has transformers' handlers, which share `state`, generate for tickets."""
    plain = state.get_manager

    def get_manager(model_id: str, use_cb: bool = False):
        if not use_cb and model_id not in state._generate_managers:
            state._generate_managers[model_id] = StoppableManager()
        manager = plain(model_id, use_cb=use_cb)
        ticket = TICKET.get()
        if ticket is not None and isinstance(manager, CBGenerateManager):
            ticket.cancels_batch = lambda: manager._cb is not None and manager._cb.cancel_request(ticket.id)
        return manager

    state.get_manager = get_manager
