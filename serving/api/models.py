"""Models and aliases."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from recsys.serving.api.routing import By, JsonRoute, Ready, json_response, unhurried
from recsys.serving.auth import Scope, requires
from recsys.serving.models import UnknownModelError
from recsys.serving.schemas.common import AliasName
from recsys.serving.schemas.models import AliasBody, AliasInfo, ModelList

router = APIRouter(prefix="/v1", route_class=JsonRoute)
PathAlias = Annotated[AliasName, Path(description="`champion`, or any other name.")]


@router.get("/models", response_model=ModelList)
@requires(Scope.READ)
async def list_models(service: Ready) -> Response:
    """List models, aliases, experiments, loadable bundles, and the named formats of texts."""
    available = await service.off_loop(lambda: service.state.aliases.available)
    answer = ModelList(
        models=service.state.models.info(),
        aliases=service.state.aliases.all(),
        experiments=service.state.experiments.all(),
        available=available,
        text_formats=list(service.settings.text_formats),
    )
    return json_response(answer)


@router.put("/aliases/{name}", response_model=AliasInfo)
@requires(Scope.ADMIN)
@unhurried
async def put_alias(name: PathAlias, body: AliasBody, service: Ready, by: By) -> Response:
    """Let an alias stand for a bundle, which is loaded while the old one answers.

    Its standing rules stay, unless `rules` sets others; without `bundle` its bundle stays.
    """
    aliases, rules = service.state.aliases, service.state.rules
    service.state.experiments.check_name(name)
    if body.rules is not None:
        await rules.require(body.rules)  # unknown ones are refused before a bundle is loaded
    if body.bundle is not None:
        await aliases.put(name, body.bundle)
    if body.rules is not None:
        await rules.stand(name, body.rules, by)
    return json_response(aliases.info(name))


@router.post("/aliases/{name}/rollback", response_model=AliasInfo)
@requires(Scope.ADMIN)
@unhurried
async def rollback_alias(name: PathAlias, service: Ready) -> Response:
    """Let an alias stand for the bundle that it stood for before."""
    return json_response(await service.state.aliases.rollback(name))


@router.delete("/aliases/{name}", status_code=204)
@requires(Scope.ADMIN)
async def delete_alias(name: PathAlias, service: Ready, by: By) -> Response:
    """Remove an alias and its standing rules; an unused model is unloaded."""
    aliases, rules = service.state.aliases, service.state.rules
    service.state.experiments.check_unused(name)
    try:
        await aliases.remove(name)
    except UnknownModelError:
        if not rules.standing(name):  # an earlier call may have failed to remove them
            raise
    await rules.stand(name, [], by)
    return Response(status_code=204)
