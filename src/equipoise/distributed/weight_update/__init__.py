"""Updates of a running engine's weights from a trainer: one converter, two paths, one protocol."""

from equipoise.distributed.weight_update.client import EngineClient, EngineInfo, EngineSeconds, Layout
from equipoise.distributed.weight_update.colocated import ColocatedUpdate
from equipoise.distributed.weight_update.distributed import DistributedUpdate
from equipoise.distributed.weight_update.group import UpdateGroup
from equipoise.distributed.weight_update.intake import Intake, Offer
from equipoise.distributed.weight_update.manifest import Bucket, Manifest, TensorSpec, plan_buckets, spec_of
from equipoise.distributed.weight_update.packer import Packer, Region
from equipoise.distributed.weight_update.phases import Phases, UpdateReport
from equipoise.distributed.weight_update.receiver import Target, WeightReceiver
from equipoise.distributed.weight_update.sender import WeightSource

__all__ = [
    "Bucket",
    "ColocatedUpdate",
    "DistributedUpdate",
    "EngineClient",
    "EngineInfo",
    "EngineSeconds",
    "Intake",
    "Layout",
    "Manifest",
    "Offer",
    "Packer",
    "Phases",
    "Region",
    "Target",
    "TensorSpec",
    "UpdateGroup",
    "UpdateReport",
    "WeightReceiver",
    "WeightSource",
    "plan_buckets",
    "spec_of",
]
