"""The whole zoo takes an hour: its test runs when asked for with `-m zoo`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "zoo" in (config.option.markexpr or ""):
        return
    for item in items:
        if item.get_closest_marker("zoo"):
            item.add_marker(pytest.mark.skip(reason="the whole zoo: -m zoo, or make zoo"))
