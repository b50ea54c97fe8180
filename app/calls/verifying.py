"""Verify a result of the caller's own, which is sent as one more input, under the name of the output."""

from __future__ import annotations

from app.calls.service import Service
from app.intake.requests import RequestObject
from app.telemetry.context import RequestContext
from engine.options import parse_options
from engine.planning import Prepared, is_planned_at_once
from engine.prepare import named
from engine.verifying import plan_verified

__all__ = ["prepare_verification"]


async def prepare_verification(service: Service, context: RequestContext, request: RequestObject) -> Prepared:
    """Check and plan the verification of a result, which is among the inputs under the name of an output.

    The result becomes the last input of the resolved operation. Raises what `Service.prepare` raises.
    """
    options, metas = parse_options(request.options), request.metas
    op, plan = plan_verified(request.called_as, request.attributes, metas, options, service.settings.limits)
    at_once = options.fast is True or is_planned_at_once(op, reference=True)
    computation = plan() if at_once else await service.plan_in_thread(plan, context, options.deadline_ms)
    return Prepared(op, (computation,), options, named(op, metas))
