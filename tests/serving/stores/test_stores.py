"""SQLite and PostgreSQL inherit the suite of stores."""

import pytest
from oracles import PATIENCE_S
from store_suite import StoreSuite

from recsys.serving.stores import sqlite


class TestSqlite(StoreSuite):
    @pytest.fixture
    def location(self, tmp_path, monkeypatch):
        monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", PATIENCE_S)  # two stores, and a busy disk
        return f"sqlite:///{tmp_path}/var/histories.db"


class TestPostgres(StoreSuite):
    @pytest.fixture
    def location(self, postgres):
        return postgres.url
