"""What ranks do together."""

from pathlib import Path

from ptf.compute.world import World, groups_apart
from ptf.config.sections.compute import MeshSizes
from ptf.errors import UserError
from tests.model.ranks import two_ranks, world_of


def _errors() -> list[str]:
    def raises(error: Exception) -> None:
        raise error

    world, found = world_of(MeshSizes(shard=2)), []
    assert world.together(lambda: world.rank) == 0
    for error in (UserError("wrong"), KeyError("ours")):
        try:
            world.together(lambda error=error: raises(error))
        except Exception as raised:
            found.append(f"{type(raised).__name__}: {raised}")
    return found


def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    first, second = two_ranks(_errors, tmp_path)
    assert first == ["UserError: wrong", "KeyError: 'ours'"]
    assert second == ["UserError: wrong", "RuntimeError: rank 0: KeyError('ours')"]
    assert World().together(lambda: 1) == 1


def test_groups_whose_ranks_are_on_several_machines_are_counted() -> None:
    assert groups_apart(["a", "a", "b", "b"], 2) == 0
    assert groups_apart(["a", "a", "a", "b", "b", "b"], 2) == 1
    assert groups_apart(["a", "b", "a", "b"], 2) == 2
