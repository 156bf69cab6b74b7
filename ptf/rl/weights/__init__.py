"""How weights travel from the policy to the engines, and how that is verified.

`transports` is the table of the transports, which `rollout.transport` chooses from. `stored` is the code of
`object_store` and `files`, whose buckets exist as a whole before an engine reads them; `streamed` is that of `ipc` and
`nccl`, whose buckets are sent while the engines read. `verification` compares what an engine received with what the
policy announced.
"""
