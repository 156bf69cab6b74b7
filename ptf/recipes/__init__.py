"""The training algorithms, one package each. `registry` lists them; `protocol` defines what a recipe provides."""
