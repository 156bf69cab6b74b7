"""Judge model-written code with tests that the code cannot access.

The response and the tests run in two processes, each confined in a cell of its own, and only plain data crosses between
them. `ptf.rl.rewards.sandbox.run_tests.run_tests` is the function to call; docs/rl.md and SECURITY.md describe what is
guaranteed.
"""
