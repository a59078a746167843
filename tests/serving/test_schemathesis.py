"""The OpenAPI document held against the service: what is generated from it and around it."""

import pytest
from hypothesis import HealthCheck, given, settings

from recsys.serving.api.routes import ROUTES
from recsys.serving.settings import ServingSettings

EXAMPLES = 12


@pytest.fixture(scope="module")
def api(tmp_path_factory, serving, fake):
    import schemathesis  # which takes a second, and one process of the suite needs it

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
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    whole = (
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    )

    @given(case=api[path][method].as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        case.call_and_validate(checks=whole)

    holds()
