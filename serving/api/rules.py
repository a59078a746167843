"""Business rules: named filters, boosts, pins and caps that requests and aliases refer to."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from recsys.serving.api.routing import By, JsonRoute, Ready, json_response, pay_for
from recsys.serving.auth import Scope, requires
from recsys.serving.schemas.rules import (
    RuleBody,
    RuleInfo,
    RuleList,
    RuleName,
    RulesQuery,
)

router = APIRouter(prefix="/v1", route_class=JsonRoute)
PathRule = Annotated[RuleName, Path(description="Name of a rule.")]


@router.get("/rules", response_model=RuleList)
@requires(Scope.READ)
async def list_rules(query: Annotated[RulesQuery, Query()], service: Ready) -> Response:
    """List the rules page by page, sorted by name, with their last changes and their aliases."""
    pay_for(query.limit)
    rules = service.state.rules
    # A rule may have a megabyte.
    return await service.off_loop(lambda: json_response(rules.page(query.cursor, query.limit)))


@router.put("/rules/{name}", response_model=RuleInfo)
@requires(Scope.WRITE)
async def put_rule(name: PathRule, body: RuleBody, service: Ready, by: By) -> Response:
    """Add a rule, or replace it; from the response on it applies to requests that name it."""
    return json_response(await service.state.rules.put(name, body, by))


@router.delete("/rules/{name}", status_code=204)
@requires(Scope.WRITE)
async def delete_rule(name: PathRule, service: Ready, by: By) -> Response:
    """Delete a rule that no alias has."""
    await service.state.rules.delete(name, by)
    return Response(status_code=204)
