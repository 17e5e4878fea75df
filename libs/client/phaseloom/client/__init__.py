"""The library that a controller imports.

async with connect() as mesh:
    job = await mesh.submit_job("hello", [DeploymentSpec(...)])
    policy = job.deployment("policy")
    policy.forward_backward(batch, "cross_entropy")
    print(await policy.optim_step(AdamParams(learning_rate=1e-4)))
    await job.finish()
"""

from phaseloom.client.hooks import (
    OperationEnded,
    PhaseBegan,
    PhaseEnded,
    RuntimeEvent,
    RuntimeHook,
)
from phaseloom.client.job import Deployment, Job
from phaseloom.client.mesh import CheckpointArchive, Mesh, MeshJob, connect
from phaseloom.client.operations import Lost, OperationHandle, outcome_of
from phaseloom.client.phases import Phase, phase, runtime_hook
from phaseloom.client.rollouts import Rollout, RolloutResult, VersionRun
from phaseloom.client.streams import GenerateHandle, Piece
from phaseloom.client.trackers import tracker
from phaseloom.common.contract.api import (
    Checkpoint,
    CheckpointList,
    Explanation,
    JobStatus,
    SavedCheckpoint,
)
from phaseloom.common.contract.arrays import Float32s, float32s, int32s
from phaseloom.common.contract.continuation import continued
from phaseloom.common.contract.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.contract.operations import (
    AdamParams,
    After,
    Datum,
    DeleteCheckpointResult,
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    LoadStateResult,
    Loss,
    NamedWeights,
    OptimStepResult,
    Progress,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
    SaveStateResult,
    Sequence,
    SyncWeightsResult,
)
from phaseloom.common.contract.specs import (
    Adapter,
    Batching,
    Cycle,
    DeploymentSpec,
    Durability,
    Layout,
    ModelSpec,
    OptimizerOn,
    Segment,
)

__all__ = [
    "AdamParams",
    "Adapter",
    "After",
    "Batching",
    "CallerError",
    "Checkpoint",
    "CheckpointArchive",
    "CheckpointList",
    "Code",
    "Cycle",
    "Datum",
    "DeleteCheckpointResult",
    "Deployment",
    "DeploymentSpec",
    "Durability",
    "Explanation",
    "Float32s",
    "ForwardBackwardResult",
    "ForwardResult",
    "GenerateHandle",
    "GenerateResult",
    "InternalError",
    "Job",
    "JobStatus",
    "Layout",
    "LoadStateResult",
    "Loss",
    "Lost",
    "Mesh",
    "MeshJob",
    "ModelSpec",
    "NamedWeights",
    "OperationEnded",
    "OperationHandle",
    "OptimStepResult",
    "OptimizerOn",
    "Phase",
    "PhaseBegan",
    "PhaseEnded",
    "PhaseloomError",
    "Piece",
    "Progress",
    "Prompt",
    "PublishWeightsResult",
    "ResourceError",
    "Rollout",
    "RolloutResult",
    "RuntimeEvent",
    "RuntimeHook",
    "SamplingParams",
    "SaveStateResult",
    "SavedCheckpoint",
    "Segment",
    "Sequence",
    "SyncWeightsResult",
    "VersionRun",
    "connect",
    "continued",
    "float32s",
    "int32s",
    "outcome_of",
    "phase",
    "runtime_hook",
    "tracker",
]
