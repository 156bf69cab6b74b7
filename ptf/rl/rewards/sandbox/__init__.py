"""ScoringRecipe code that a model wrote by tests that it cannot reach. `ptf.rl.rewards.sandbox.judge` is the entry;
docs/rl.md and SECURITY.md say what is promised.

The one idea: the answer and the tests are two processes, each confined in a cell of its own,
and only plain data crosses between them.
"""
