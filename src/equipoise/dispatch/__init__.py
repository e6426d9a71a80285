"""Token dispatchers: rows to the ranks that own their experts, and back."""

from typing import Literal

from equipoise.dispatch.all_gather import AllGatherDispatcher
from equipoise.dispatch.all_to_all import AllToAllDispatcher
from equipoise.dispatch.base import Dispatched, Dispatcher
from equipoise.dispatch.domains import DomainDispatcher
from equipoise.dispatch.local import LocalDispatcher
from equipoise.dispatch.symmetric import SymmetricDispatcher
from equipoise.distributed.collectives import Group
from equipoise.symmetric.space import SymmetricSpace

DispatcherName = Literal["auto", "local", "all_to_all", "all_gather", "symmetric", "deepep"]


def build_dispatcher(
    name: DispatcherName,
    num_experts: int,
    ep_group: Group | None,
    space: SymmetricSpace | None = None,
    **options: float,
) -> Dispatcher:
    """The dispatcher called `name` over a group or a mesh of one axis.

    `auto` is `local` for one rank, otherwise `symmetric` if there is a symmetric `space` of the group, else
    `all_to_all`. `symmetric` with the space of a domain, consecutive ranks of the group, uses it for rows within the
    domain and messages for the others. Over a mesh the dispatcher goes on after parking. `options`: those of
    `SymmetricDispatcher`, which serves all layers; others take none.

    Raises:
        ValueError: `local` was asked for in a group of several ranks, `symmetric` without a space, or the experts do
            not divide evenly. ConfigError (a ValueError): `deepep` without the package.
    """
    num_ranks = 1 if ep_group is None else ep_group.size()
    if num_experts % num_ranks:
        raise ValueError(f"{num_experts} experts cannot be split over an EP group of {num_ranks} ranks")
    if name == "auto":
        name = "local" if num_ranks == 1 else "all_to_all" if space is None else "symmetric"
    if name == "local" or ep_group is None:
        if num_ranks > 1:
            raise ValueError(
                f"dispatcher 'local' cannot serve an EP group of {num_ranks} ranks: use all_to_all or all_gather"
            )
        return LocalDispatcher(num_experts)
    if name == "symmetric":
        if space is None:
            raise ValueError("dispatcher 'symmetric' needs the symmetric space of its EP group")
        near = SymmetricDispatcher(num_experts // num_ranks * space.num_ranks, space, **options)  # type: ignore[arg-type]
        return near if space.num_ranks == num_ranks else DomainDispatcher(num_experts, ep_group, near)
    if name == "deepep":
        from equipoise.dispatch.deepep import DeepEPDispatcher

        return DeepEPDispatcher(num_experts, ep_group)
    if name == "all_to_all":
        return AllToAllDispatcher(num_experts, ep_group)
    return AllGatherDispatcher(num_experts, ep_group)


__all__ = ["Dispatched", "Dispatcher", "DispatcherName", "LocalDispatcher", "SymmetricDispatcher", "build_dispatcher"]
