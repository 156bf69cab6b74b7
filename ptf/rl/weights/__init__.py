"""How weights travel from the policy to the engines, and how that is verified.

ptf/config/transports.py is the table of the transports, which `rollout.transport` chooses from; `transport` is what the
controller sees of one. `stored` has `object_store` and `files`, whose buckets exist as a whole before an engine reads
them; `streamed` is what `ipc` and `nccl` share, whose buckets are sent while the engines read. `verification` compares
what an engine received with what the policy announced.
"""
