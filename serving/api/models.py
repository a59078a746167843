"""Models, their aliases, and the rules and experiments of aliases."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from recsys.serving.api.routing import By, Ready, Route, json_response, pay_for, unhurried
from recsys.serving.auth import Scope, requires
from recsys.serving.schemas.common import AliasName
from recsys.serving.schemas.experiments import (
    ExperimentBody,
    ExperimentInfo,
    ExperimentName,
    ExperimentResults,
)
from recsys.serving.schemas.models import AliasBody, AliasInfo, ModelList
from recsys.serving.schemas.rules import RuleBody, RuleInfo, RuleList, RuleName

router = APIRouter(prefix="/v1", route_class=Route)
PathAlias = Annotated[AliasName, Path(description="`champion`, or any other name.")]
PathExperiment = Annotated[ExperimentName, Path(description="Name of an experiment.")]
PathRule = Annotated[RuleName, Path(description="Name of a rule.")]


@router.get("/models", response_model=ModelList)
@requires(Scope.READ)
async def list_models(service: Ready) -> Response:
    """List models, aliases, experiments, loadable bundles, and the named formats of texts."""
    aliases, models = service.state.aliases, service.state.models
    available = await service.off_loop(aliases.bundles.names)
    answer = ModelList(
        models=models.info(),
        aliases=[aliases.info(name) for name in sorted(models.aliases)],
        experiments=service.state.experiments.all(),
        available=available,
        text_formats=list(service.settings.text_formats),
    )
    return json_response(answer)


@router.put("/aliases/{name}", response_model=AliasInfo)
@requires(Scope.ADMIN)
@unhurried
async def put_alias(name: PathAlias, body: AliasBody, service: Ready) -> Response:
    """Let an alias stand for a bundle, which is loaded while the old one answers.

    Its standing rules stay, unless `rules` sets others; without `bundle` its bundle stays.
    """
    aliases, rules = service.state.aliases, service.state.rules
    service.state.experiments.check_name(name)
    if body.rules is not None:
        await rules.require(body.rules)  # wrong ones are refused before a bundle is loaded
    if body.bundle is not None:
        await aliases.put(name, body.bundle, rules=body.rules or ())
    if body.rules is not None:
        await rules.stand(name, body.rules)
    return json_response(aliases.info(name))


@router.post("/aliases/{name}/rollback", response_model=AliasInfo)
@requires(Scope.ADMIN)
@unhurried
async def rollback_alias(name: PathAlias, service: Ready) -> Response:
    """Let an alias stand for the bundle that it stood for before."""
    return json_response(await service.state.aliases.rollback(name))


@router.delete("/aliases/{name}", status_code=204)
@requires(Scope.ADMIN)
@unhurried
async def delete_alias(name: PathAlias, service: Ready) -> Response:
    """Remove an alias and its standing rules; an unused model is unloaded."""
    aliases, rules = service.state.aliases, service.state.rules
    service.state.experiments.check_unused(name)
    # An earlier call may have failed to remove the rules.
    if name in service.state.models.aliases or not rules.standing(name):
        await aliases.remove(name)
    await rules.stand(name, [])
    return Response(status_code=204)


@router.get("/rules", response_model=RuleList)
@requires(Scope.READ)
async def list_rules(service: Ready) -> Response:
    """List the rules, sorted by name, with their last changes and their aliases."""
    rules = service.state.rules
    pay_for(len(rules))
    return json_response(await service.off_loop(rules.all))


@router.put("/rules/{name}", response_model=RuleInfo)
@requires(Scope.WRITE)
async def put_rule(name: PathRule, body: RuleBody, service: Ready, by: By) -> Response:
    """Add a rule, or replace it; from the response on it applies to requests that name it."""
    return json_response(await service.state.rules.put(name, body, by))


@router.delete("/rules/{name}", status_code=204)
@requires(Scope.WRITE)
async def delete_rule(name: PathRule, service: Ready) -> Response:
    """Delete a rule that no alias has."""
    await service.state.rules.delete(name)
    return Response(status_code=204)


@router.put("/experiments/{name}", response_model=ExperimentInfo)
@requires(Scope.ADMIN)
async def put_experiment(
    name: PathExperiment, body: ExperimentBody, service: Ready, by: By
) -> Response:
    """Start an experiment; from the response on, requests may have its name as `model`."""
    return json_response(await service.state.experiments.put(name, body, by))


@router.delete("/experiments/{name}", status_code=204)
@requires(Scope.ADMIN)
async def delete_experiment(name: PathExperiment, service: Ready) -> Response:
    """Delete an experiment and what is known about its users' answers."""
    await service.state.experiments.delete(name)
    return Response(status_code=204)


@router.get("/experiments/{name}/results", response_model=ExperimentResults)
@requires(Scope.READ)
async def get_results(name: PathExperiment, service: Ready) -> Response:
    """Compare the arms with the first one. It may be called as often as you like."""
    return json_response(await service.state.experiments.results(name))
