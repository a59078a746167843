"""The OpenAPI document held against the service: what is generated from it and around it."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from recsys.serving.api.routes import ROUTES
from recsys.serving.settings import ServingSettings

EXAMPLES = 12
CHECKS = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)


@pytest.fixture(scope="module")
def api(tmp_path_factory, serving, fake):
    folder = tmp_path_factory.mktemp("api")
    made = ServingSettings(bundle=folder / "demo", histories=None, store=folder / "h.db")
    with serving(made, recommender=fake()) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.hypothesis  # so that `make fuzz` finds it
@pytest.mark.parametrize(
    ("method", "path"),
    [(m, r.path_format) for r in ROUTES if r.include_in_schema for m in r.methods],
)
def test_generated_requests_get_documented_responses(api, method, path):
    @given(case=api[path][method].as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        case.call_and_validate(checks=CHECKS)

    holds()
