"""Multi-token prediction: layers behind the model that predict further tokens, for a denser training signal.

Source: DeepSeek-V3's technical report (arXiv 2412.19437), section 2.2, and its released weights. The layer of depth
k = 1, 2, ... predicts token i + k + 1 at position i, from the hidden state of depth k - 1 (of the model where k = 1)
and the embedding of token i + k. Embedding and output head are the model's. `eh_proj` takes the embedding first. A
hidden state is passed on behind its last norm (`model.norm`, `shared_head.norm`), as the released weights are run.

Shapes: B sequences, S tokens, D features.
"""

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.models.attention import AttentionMask
from equipoise.models.config import ModelConfig
from equipoise.models.layer import DecoderLayer
from equipoise.models.recompute import recomputed
from equipoise.moe.experts import ExpertKernel
from equipoise.moe.router import Routing


def shift_left(x: torch.Tensor, fill: float = 0) -> torch.Tensor:
    """[B, S, ...] with what stands one position ahead; `fill` at the last."""
    return F.pad(x[:, 1:], (*(0, 0) * (x.dim() - 2), 0, 1), value=fill)


def tokens_in_reach(
    input_ids_BS: torch.Tensor, document_ids_BS: torch.Tensor | None, valid_BS: torch.Tensor | None, num_depths: int
) -> list[torch.Tensor]:
    """Bool [B, S] for each depth k: whether the token k positions ahead is there, no padding, and of the same document.

    Only there a layer has an input and, with the label k positions ahead, a target; elsewhere its tokens are padding.
    """
    if not num_depths:
        return []
    if valid_BS is None:
        valid_BS = torch.ones_like(input_ids_BS, dtype=torch.bool)
    next_BS = valid_BS & shift_left(valid_BS)
    if document_ids_BS is not None:
        next_BS = next_BS & (document_ids_BS == shift_left(document_ids_BS))
    reach = [next_BS]
    while len(reach) < num_depths:
        reach.append(next_BS & shift_left(reach[-1]))
    return reach


class _SharedHead(nn.Module):
    """The norm before the model's output head, under the name that checkpoints give it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class MTPLayer(DecoderLayer):
    """One depth: joins hidden state and embedding to the input of a decoder layer. Names are those of DeepSeek-V3."""

    def __init__(self, config: ModelConfig, index: int, expert_kernel: ExpertKernel) -> None:
        super().__init__(config, index, expert_kernel)
        self.enorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hnorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.shared_head = _SharedHead(config)

    def forward(  # type: ignore[override]
        self,
        hidden_BSD: torch.Tensor,
        ahead_BSD: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        mask: AttentionMask,
        reach_BS: torch.Tensor,
        microbatch: int = 0,
    ) -> tuple[torch.Tensor, Routing | None]:
        """Normed hidden state for the output head and the next depth, from that of the depth before and the embeddings
        of the tokens ahead, of which those in reach count."""
        inputs = (hidden_BSD, ahead_BSD, rotary, mask, reach_BS, microbatch)
        return recomputed(self.recompute, self._join_and_run, *inputs)

    def _join_and_run(
        self, hidden_BSD, ahead_BSD, rotary, mask, reach_BS, microbatch: int
    ) -> tuple[torch.Tensor, Routing | None]:
        hidden_BSD = self.hnorm(hidden_BSD)  # first: FSDP reduces the unit when its first input has its gradient
        x_BSD = self.eh_proj(torch.cat([self.enorm(ahead_BSD), hidden_BSD], dim=-1))
        x_BSD, routing = self._run(x_BSD, rotary, mask, reach_BS, microbatch)
        return self.shared_head.norm(x_BSD), routing
