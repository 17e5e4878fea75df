"""The message contract: every type that crosses the bus or a node's sockets, one module an edge.

operations    controller → router, WPG leader; outcomes back to the controller
kinds         the table of operation kinds: how each is checked, cut, merged and measured
events        every service → decision log → scheduler, and notices for people
commands      scheduler → a node's agent
agents        agent ↔ agent, for a WPG over several nodes
api           controller and operator ↔ scheduler and router, request and reply
state_agent   agent ↔ state manager, over the node's Unix socket
state_rank    rank ↔ state manager, over the node's Unix socket
specs         the descriptions of jobs, deployments, devices and the scheduler's settings
state_layout  the description of a rank's state for its state manager

Conventions
- Frozen structs; unions are tagged by `type` (snake case). Unknown fields are ignored, missing
  ones refused. JSON (`application/json`) or MessagePack (`application/msgpack`), by the
  `Content-Type` header.
- `…_s` are seconds (durations, unless named `…_unix_s`), `…_bytes` bytes.
- Arrays of tokens and log-probabilities are JSON lists, or little-endian bytes (int32, float32)
  in MessagePack; `phaseloom.common.contract.arrays` converts.
- Weights never ride the bus. Nothing is ever unpickled.
"""
