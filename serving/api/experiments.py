"""Experiments: users divided among aliases, and the comparison of what they do."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from recsys.serving.api.routing import By, JsonRoute, Ready, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.schemas.experiments import (
    ExperimentBody,
    ExperimentInfo,
    ExperimentName,
    ExperimentResults,
)

router = APIRouter(prefix="/v1/experiments", route_class=JsonRoute)
PathExperiment = Annotated[ExperimentName, Path(description="Name of an experiment.")]


@router.put("/{name}", response_model=ExperimentInfo)
@requires(Scope.ADMIN)
async def put_experiment(
    name: PathExperiment, body: ExperimentBody, service: Ready, by: By
) -> Response:
    """Start an experiment; from the response on, requests may have its name as `model`."""
    return json_response(await service.state.experiments.put(name, body, by))


@router.delete("/{name}", status_code=204)
@requires(Scope.ADMIN)
async def delete_experiment(name: PathExperiment, service: Ready, by: By) -> Response:
    """Delete an experiment and what is known about its users' answers."""
    await service.state.experiments.delete(name, by)
    return Response(status_code=204)


@router.get("/{name}/results", response_model=ExperimentResults)
@requires(Scope.READ)
async def get_results(name: PathExperiment, service: Ready) -> Response:
    """Compare the arms with the first one. It may be called as often as you like."""
    return json_response(await service.state.experiments.results(name))
