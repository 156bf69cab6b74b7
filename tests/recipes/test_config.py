import importlib
from dataclasses import MISSING, fields

import pytest

from ptf.config.recipes import RECIPES, algo_config_of


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_without_arguments_is_that_of_a_job_without_keys(name):
    entry = RECIPES[name]
    recipe = getattr(importlib.import_module(f"{entry.package}.recipe"), entry.name)
    config = {
        key: field.get_default(call_default_factory=True)
        for key, field in algo_config_of(name).model_fields.items()
        if not field.is_required()
    }
    own = {
        field.name: (field.default if field.default is not MISSING else field.default_factory())
        for field in fields(recipe)
        if field.default is not MISSING or field.default_factory is not MISSING
    }
    both = config.keys() & own.keys() - {"tis_cap"}  # auto depends on the precision
    assert both or name == "sft", "it has no keys"
    assert {key: own[key] for key in both} == {key: config[key] for key in both}
