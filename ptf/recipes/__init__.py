"""The training algorithms, one package each. `ptf.config.recipes` lists them, `protocol` defines what they provide."""
