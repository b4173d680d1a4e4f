"""The OpenAI routes for text: chat and completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.common.clock import now_ms
from penstock.gateway.limits.callers import caller_of
from penstock.gateway.openai import chat_bodies as shapes
from penstock.gateway.openai import endpoints
from penstock.gateway.openai.endpoints import Endpoint
from penstock.gateway.openai.group import Group, writer_of
from penstock.gateway.openai.routes import Exchange, unknown_fields
from penstock.gateway.openai.several import TextBody, bodies_of
from penstock.gateway.routes.multipart import BodyRoute

router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)


@router.post("/chat/completions", summary="Chat, as OpenAI's API has it")
async def create_chat_completion(body: shapes.ChatCompletionBody, request: Request) -> Response:
    """Plain or streamed. A client that disconnects cancels."""
    return await _text_answer(request, body, endpoints.CHAT)


@router.post("/completions", summary="Text completion, as OpenAI's API has it")
async def create_completion(body: shapes.CompletionBody, request: Request) -> Response:
    """Plain or streamed, of one prompt or several. A client that disconnects cancels."""
    return await _text_answer(request, body, endpoints.COMPLETION)


async def _text_answer(request: Request, body: TextBody, endpoint: Endpoint) -> Response:
    ignored = endpoint.set_aside(body, unknown_fields(request))
    images = endpoint.images(body, caller_of(request))
    bodies = bodies_of(body, may_split_answers=not images)
    if len(bodies) > 1:
        group = await Group.of(request, body, bodies, endpoint, ignored)
        return group.stream() if body.stream else await group.answer()
    asked = endpoint.ask(bodies[0], caller_of(request), now_ms())
    exchange = await Exchange.begin(request, asked, endpoint, images)
    exchange.ignored = ignored
    if exchange.streams:
        return exchange.stream(writer_of(exchange.made, bodies[0]))
    return await exchange.answer(bodies[0])
