"""SQLite and PostgreSQL inherit the suite of stores."""

import pytest
from store_suite import StoreSuite


class TestSqlite(StoreSuite):
    @pytest.fixture
    def location(self, tmp_path):
        return f"sqlite:///{tmp_path}/var/histories.db"


class TestPostgres(StoreSuite):
    @pytest.fixture
    def location(self, postgres):
        return postgres.url
