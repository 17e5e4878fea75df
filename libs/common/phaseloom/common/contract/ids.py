"""Names and keys of tenants, jobs, deployments, operations and weights versions.

The text form of a key (`str(key)`) is its NATS subject suffix. Subjects, logs, spans and files use
the same spelling.
"""

from __future__ import annotations

import re
from typing import NewType

import msgspec

from phaseloom.common.contract.errors import CallerError

NodeId = NewType("NodeId", str)

COPY_PREFIX = "slices-"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")
_MAX_SEQ_DIGITS = 18
SEQ_END = 10**_MAX_SEQ_DIGITS
"""Every `seq` is below this value."""
_SEQ = re.compile(r"[1-9][0-9]{0,17}\Z")
_MODEL_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_MODEL_NAME = re.compile(rf"{_MODEL_PART}(/{_MODEL_PART})?(:{_MODEL_PART})?\Z")
_MAX_MODEL_NAME = 128
_UNESCAPED = re.compile(r"[^A-Za-z0-9_-]")
_ESCAPE = re.compile(r"=([0-9A-F]{2})")
_UNORDERED = re.compile(r"r[A-Za-z0-9]{1,63}\Z")


def is_name(name: str) -> bool:
    """Whether `check_name` accepts the name."""
    return _NAME.match(name) is not None


def check_name(name: str, field: str) -> str:
    """Check that a name can serve as one subject token and as a file name. Returns: the name.

    Raises: CallerError: it is not 1 to 64 of A-Z a-z 0-9 _ -, starting with a letter or digit.
    """
    if not is_name(name):
        raise CallerError(
            f"{name!r} is not a valid name",
            field=field,
            remedy="use 1 to 64 letters, digits, '_' or '-', starting with a letter or digit",
        )
    return name


def is_model_name(name: str) -> bool:
    """Whether `check_model_name` accepts the name."""
    is_short = len(name) <= _MAX_MODEL_NAME
    return is_short and ".." not in name and _MODEL_NAME.match(name) is not None


def check_model_name(name: str, field: str) -> str:
    """Check the name of a registered model: a Hub id, such as `org/model` or `org/model:suffix`.

    Returns: the name. Names that differ in case are different models.
    Raises: CallerError.
    """
    if not is_model_name(name):
        raise CallerError(
            f"{name[:_MAX_MODEL_NAME]!r} is not a valid model name",
            field=field,
            remedy=f"use NAME, ORG/NAME or ORG/NAME:SUFFIX with at most {_MAX_MODEL_NAME} "
            "characters; each part has letters, digits, '.', '_' or '-', starts with a letter or "
            "digit, and never has '..'",
        )
    return name


def to_token(name: str) -> str:
    """Encode a model's name as one subject token, KV key and file name: `=2F` replaces `/`.

    Letters, digits, `_` and `-` stay, so a name that `check_name` accepts is its own token.
    Different names have different tokens.
    """
    return _UNESCAPED.sub(lambda match: f"={ord(match[0]):02X}", name)


def from_token(token: str) -> str:
    """Return the name that `to_token` has encoded."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), token)


class JobKey(msgspec.Struct, frozen=True, order=True):
    tenant: str
    job: str

    def __str__(self) -> str:
        return f"{self.tenant}.{self.job}"


class DeploymentKey(msgspec.Struct, frozen=True, order=True):
    tenant: str
    job: str
    deployment: str

    @property
    def job_key(self) -> JobKey:
        return JobKey(self.tenant, self.job)

    def __str__(self) -> str:
        return f"{self.tenant}.{self.job}.{self.deployment}"


def check_key(key: DeploymentKey) -> DeploymentKey:
    """Check each name of a key. Returns: the key. Raises: see `check_name`."""
    for name in (key.tenant, key.job, key.deployment):
        check_name(name, "deployment")
    return key


def parse_source(reader: DeploymentKey, source: str) -> DeploymentKey:
    """Return the deployment that saved a checkpoint.

    Args:   own: the deployment that loads it.
            source: `<job>/<deployment>`; empty: `own`.
    Raises: CallerError: `source` does not have this form.
    """
    if not source:
        return reader
    job, _, deployment = source.partition("/")
    for name in (job, deployment):
        check_name(name, "args.source")
    return DeploymentKey(reader.tenant, job, deployment)


class OperationKey(msgspec.Struct, frozen=True, order=True):
    """The name of an operation. `slot` is its `seq` in decimal, or `r…` for an unordered reading
    operation."""

    tenant: str
    job: str
    deployment: str
    slot: str

    @property
    def seq(self) -> int | None:
        # Equivalent to matching `_SEQ`, but three times as fast; this property is hot.
        slot = self.slot
        is_number = slot.isdecimal() and slot.isascii() and len(slot) <= _MAX_SEQ_DIGITS
        return int(slot) if is_number and slot[0] != "0" else None

    @property
    def deployment_key(self) -> DeploymentKey:
        return DeploymentKey(self.tenant, self.job, self.deployment)

    @property
    def deployment_name(self) -> str:
        """The text form of `deployment_key`."""
        return f"{self.tenant}.{self.job}.{self.deployment}"

    @property
    def job_key(self) -> JobKey:
        return JobKey(self.tenant, self.job)

    def __str__(self) -> str:
        return f"{self.tenant}.{self.job}.{self.deployment}.{self.slot}"


class VersionKey(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A weights version: the policy that published it and the `seq` of the publish."""

    policy: DeploymentKey
    seq: int
    part: str = ""
    """The part of the version, used between state managers. `2of4` is the third of four parts, each
    written by one rank; `slices-…` is a copy of the slices that one reader needs. Empty: the whole
    version."""

    def __str__(self) -> str:
        return f"{self.policy}.{self.seq}{'/' if self.part else ''}{self.part}"

    @property
    def whole(self) -> VersionKey:
        return VersionKey(self.policy, self.seq) if self.part else self

    @property
    def is_copy(self) -> bool:
        """Whether the key names a copy of slices whose originals are stored in other parts."""
        return self.part.startswith(COPY_PREFIX)


def parse_operation_key(suffix: str) -> OperationKey:
    """Parse the text form of a key.

    Raises: CallerError: the text is not four valid tokens.
    """
    tokens = suffix.split(".")
    if len(tokens) != 4:
        raise CallerError(
            f"expected <tenant>.<job>.<deployment>.<seq>, got {suffix!r}",
            field="subject",
            remedy="use a key such as demo.chain_sum.policy.7; its subject is pl.v1.op.<key>",
        )
    tenant, job, deployment, slot = tokens
    check_name(tenant, "subject.tenant")
    check_name(job, "subject.job")
    check_name(deployment, "subject.deployment")
    if not (_SEQ.match(slot) or _UNORDERED.match(slot)):
        raise CallerError(
            f"expected a sequence number or the id of an unordered operation, got {slot!r}",
            field="subject.seq",
            remedy="number a deployment's operations from 1, or use 'r' followed by letters or "
            "digits",
        )
    return OperationKey(tenant, job, deployment, slot)
