"""What a controller imports.

async with connect() as mesh:
    job = await mesh.submit_job("hello", [DeploymentSpec(...)])
    policy = job.deployment("policy")
    policy.forward_backward(batch, "cross_entropy")
    print(await policy.optim_step(AdamParams(learning_rate=1e-4)))
    await job.finish()
"""

from phaseloom.client.job import Deployment, Job
from phaseloom.client.mesh import Mesh, MeshJob, connect
from phaseloom.client.operations import OperationHandle
from phaseloom.common.arrays import float32s, int32s
from phaseloom.common.errors import (
    CallerError,
    Code,
    InternalError,
    PhaseloomError,
    ResourceError,
)
from phaseloom.common.messages import (
    AdamParams,
    After,
    Datum,
    DeploymentSpec,
    Float32s,
    ForwardBackwardResult,
    ForwardResult,
    GenerateResult,
    Loss,
    ModelSpec,
    OptimStepResult,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
    SaveStateResult,
    Sequence,
)

__all__ = [
    "AdamParams",
    "After",
    "CallerError",
    "Code",
    "Datum",
    "Deployment",
    "DeploymentSpec",
    "Float32s",
    "ForwardBackwardResult",
    "ForwardResult",
    "GenerateResult",
    "InternalError",
    "Job",
    "Loss",
    "Mesh",
    "MeshJob",
    "ModelSpec",
    "OperationHandle",
    "OptimStepResult",
    "PhaseloomError",
    "Prompt",
    "PublishWeightsResult",
    "ResourceError",
    "SamplingParams",
    "SaveStateResult",
    "Sequence",
    "connect",
    "float32s",
    "int32s",
]
