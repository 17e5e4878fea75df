"""The message contract: every type that crosses the bus or a node's sockets, one module per edge.

operations    controller → router, WPG leader; outcomes back to the controller
kinds         the table of operation kinds: how each is checked, split, merged and measured
events        every service → decision log → scheduler, and notices for people
commands      scheduler → a node's agent
agents        agent ↔ agent, for a WPG over several nodes
api           controller and operator ↔ scheduler and router, request and reply
state_agent   agent ↔ state manager, over the node's Unix socket
state_rank    rank ↔ state manager, over the node's Unix socket
specs         descriptions of jobs, deployments, devices and the scheduler's settings
state_layout  description of a rank's state for its state manager

Conventions
- Structs are frozen. Unions are tagged by `type` (snake case). Unknown fields are ignored and
  missing ones are rejected. The `Content-Type` header says whether a message is JSON
  (`application/json`) or MessagePack (`application/msgpack`).
- `…_s` are seconds (durations, unless named `…_unix_s`), `…_bytes` bytes.
- Arrays of tokens and log-probabilities are JSON lists or, in MessagePack, little-endian bytes
  (int32, float32); `phaseloom.common.contract.arrays` converts.
- Weights never travel over the bus. Nothing is ever unpickled.
"""
