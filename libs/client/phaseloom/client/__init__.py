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
from phaseloom.client.results import Generation, LogProbs, Sample
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
    Loss,
    ModelSpec,
    Prompt,
    PublishWeightsResult,
    SamplingParams,
    SaveStateResult,
)

__all__ = [
    "AdamParams",
    "After",
    "CallerError",
    "Code",
    "Datum",
    "Deployment",
    "DeploymentSpec",
    "Generation",
    "InternalError",
    "Job",
    "LogProbs",
    "Loss",
    "Mesh",
    "MeshJob",
    "ModelSpec",
    "OperationHandle",
    "PhaseloomError",
    "Prompt",
    "PublishWeightsResult",
    "ResourceError",
    "Sample",
    "SamplingParams",
    "SaveStateResult",
    "connect",
]
