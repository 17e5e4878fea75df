from __future__ import annotations

import pytest

from phaseloom.cli.supervisor import MeshConfig
from phaseloom.cli.up import with_policies
from phaseloom.common.contract.errors import CallerError


def test_policies_are_chosen_by_name() -> None:
    settings = with_policies(MeshConfig(placement="isolated"), None, "fcfs")
    assert (settings.placement, settings.ordering) == ("isolated", "fcfs")
    assert with_policies(settings, "pack", None).placement == "pack"


@pytest.mark.parametrize(
    ("placement", "ordering", "field", "known"),
    [("packed", None, "placement", "pack"), (None, "first", "ordering", "hrrs")],
)
def test_policy_that_there_is_not_is_refused_with_those_that_there_are(
    placement: str | None, ordering: str | None, field: str, known: str
) -> None:
    with pytest.raises(CallerError) as caught:
        with_policies(MeshConfig(), placement, ordering)
    assert caught.value.info.field == field
    assert known in (caught.value.info.remedy or "")
