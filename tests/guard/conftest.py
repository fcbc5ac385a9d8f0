import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-guard", action="store_true", help="rewrite the expected counts")
