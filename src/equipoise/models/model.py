"""The decoder-only MoE language model. Parameter names are those of transformers' Qwen3-MoE.

Shapes: B sequences, S tokens, D features, V vocabulary, T = B * S.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from equipoise.distributed.compute_copies import ComputeCopies
from equipoise.models.attention import document_mask
from equipoise.models.config import ModelConfig
from equipoise.models.cross_entropy import IGNORED_LABEL, cross_entropy_and_logprobs, label_logprobs
from equipoise.models.layer import DecoderLayer
from equipoise.models.mtp import MTPLayer, shift_left, tokens_in_reach
from equipoise.models.rotary import rotary_tables
from equipoise.moe.experts import ExpertKernel
from equipoise.moe.replay import RoutingReplay
from equipoise.moe.router import Routing
from equipoise.symmetric.space import SymmetricSpace


class ModelOutput(NamedTuple):
    """Results of a forward.

    loss_sum: float32 scalar, cross-entropy summed over the valid labels (nats); None without labels.
    logits: [B, S, V]; None when labels were given (they are never held whole then).
    routings: one entry per MoE layer that ran, in layer order.
    logprobs_BS: float32, log-probabilities of the labels at the temperature that was asked for; 0 at ignored labels.
        Without gradient, unless that was asked for.
    entropy_BS: float32, nats, of the distributions that these are of, without gradient; with them where they have one.
    mtp_loss_sum: float32 scalar, the same sum as `loss_sum` for each multi-token-prediction layer, mean over them; None
        without such layers, without labels, and in evaluation mode: they run for the training loss alone.
    """

    loss_sum: torch.Tensor | None
    logits: torch.Tensor | None
    routings: list[Routing]
    mtp_loss_sum: torch.Tensor | None = None
    logprobs_BS: torch.Tensor | None = None
    entropy_BS: torch.Tensor | None = None


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm. Multi-token-prediction layers are the last of `layers`."""

    def __init__(self, config: ModelConfig, expert_kernel: ExpertKernel = "auto") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            (DecoderLayer if i < config.num_hidden_layers else MTPLayer)(config, i, expert_kernel)
            for i in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor | None,
        document_ids_BS: torch.Tensor | None,
        valid_BS: torch.Tensor | None,
        microbatch: int = 0,
        reach: Sequence[torch.Tensor] = (),
        replay: RoutingReplay | None = None,
    ) -> tuple[list[torch.Tensor], list[Routing]]:
        """Hidden states [B, S, D] of the model and of each multi-token-prediction layer, and the routings of all.

        `reach` has a mask from `tokens_in_reach` for each of those layers, or nothing and they do not run.
        """
        x_BSD = embedded_BSD = self.embed_tokens(input_ids_BS)
        if position_ids_BS is None:
            position_ids_BS = torch.arange(input_ids_BS.shape[1], device=input_ids_BS.device)[None]
        config = self.config
        rotary = rotary_tables(position_ids_BS, config.head_dim, config.rope_theta, x_BSD.dtype, config.rope_scaling)
        mask = document_mask(document_ids_BS)
        num_main = config.num_hidden_layers
        routings: list[Routing | None] = []
        if replay is not None:
            self._plan_ahead(replay, valid_BS, microbatch)
        for layer in self.layers[:num_main]:
            recorded = None
            if replay is not None and layer.is_moe:
                recorded = replay.layer(sum(routing is not None for routing in routings))
            x_BSD, routing = layer(x_BSD, rotary, mask, valid_BS, microbatch, recorded)
            routings.append(routing)
        hiddens = [self.norm(x_BSD)]
        for layer, reach_BS in zip(self.layers[num_main:], reach):
            embedded_BSD = shift_left(embedded_BSD)
            x_BSD, routing = layer(hiddens[-1], embedded_BSD, rotary, mask, reach_BS, microbatch)
            hiddens.append(x_BSD)
            routings.append(routing)
        return hiddens, [routing for routing in routings if routing is not None]

    def _plan_ahead(self, replay: RoutingReplay, valid_BS: torch.Tensor | None, microbatch: int) -> None:
        """With the load of every layer known, a balancer plans for all of them at once."""
        layers: list[Any] = [layer for layer in self.layers[: self.config.num_hidden_layers] if layer.is_moe]
        balancings = [layer.mlp.balancing for layer in layers]
        if replay.is_complete and balancings and balancings[0] is not None:
            recorded = [replay.layer(index) for index in range(len(layers))]
            balancings[0].plan_ahead(balancings, recorded, valid_BS, microbatch)


class LMHead(nn.Linear):
    """Output projection, with a loss that never holds more than a bounded number of logits."""

    def forward(  # type: ignore[override]
        self,
        *hiddens_BSD: torch.Tensor,
        labels_BS: Sequence[torch.Tensor] = (),
        temperature: float | None = None,
        train_logprobs: bool = False,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Logits of one hidden state; with labels for each, the summed cross-entropy of each in FP32. With a
        temperature the first labels' log-probabilities follow. With `train_logprobs` those, with a gradient, and the
        entropies are all.

        One call serves all of a forward: an FSDP unit that holds it reduces its gradient once.
        """
        if not labels_BS:
            (x_BSD,) = hiddens_BSD
            return super().forward(x_BSD)
        if train_logprobs:
            assert temperature is not None
            x_TD = hiddens_BSD[0].flatten(0, 1)
            return list(label_logprobs(x_TD, self.weight, labels_BS[0].flatten(), temperature))
        sums: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        for x_BSD, labels in zip(hiddens_BSD, labels_BS, strict=True):
            wanted = None if sums else temperature
            loss, logprobs_T = cross_entropy_and_logprobs(x_BSD.flatten(0, 1), self.weight, labels.flatten(), wanted)
            sums.append(loss)
            logprobs += [] if wanted is None else [logprobs_T]
        return sums + logprobs


class MoEForCausalLM(nn.Module):
    """The whole language model; `model.*` and `lm_head.weight` as in transformers."""

    def __init__(self, config: ModelConfig, expert_kernel: ExpertKernel = "auto") -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, expert_kernel)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.symmetric_space: SymmetricSpace | None = None
        """What the symmetric dispatcher and transport of this model share; set by whoever makes it parallel."""
        self.copies: ComputeCopies | None = None
        """16-bit copies of weights; see `use_copies`."""

    def use_copies(self, copies: ComputeCopies) -> None:
        """Computes with these copies of weights from now on; each forward first brings them up to date."""
        self.copies = copies
        self.register_forward_pre_hook(lambda model, inputs: copies.refresh())

    def forward(
        self,
        input_ids_BS: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        position_ids_BS: torch.Tensor | None = None,
        document_ids_BS: torch.Tensor | None = None,
        valid_BS: torch.Tensor | None = None,
        microbatch: int = 0,
        replay: RoutingReplay | None = None,
        temperature: float | None = None,
        train_logprobs: bool = False,
    ) -> ModelOutput:
        """Runs the model.

        Args:
            input_ids_BS: int64 token ids.
            labels_BS: int64 next-token labels, already shifted; `IGNORED_LABEL` where there is none.
            position_ids_BS: int64 rotary positions; None counts from 0 in each sequence.
            document_ids_BS: integers that differ between packed documents; None for plain causal attention.
            valid_BS: bool, False for padding tokens, which no expert sees and no statistic counts; None means all.
            microbatch: number that tells this forward from others whose backward is still to come.
            replay: recorded experts of this microbatch, to be followed by all layers but those that predict further
                tokens.
            temperature: with labels, also their log-probabilities at it.
            train_logprobs: with labels and a temperature, those with a gradient, and entropies, in place of the loss;
                layers that predict further tokens do not run.
        """
        with_loss = labels_BS is not None and not train_logprobs
        depths = self.config.num_nextn_predict_layers if self.training and with_loss else 0
        reach = tokens_in_reach(input_ids_BS, document_ids_BS, valid_BS, depths)
        hiddens, routings = self.model(
            input_ids_BS, position_ids_BS, document_ids_BS, valid_BS, microbatch, reach, replay
        )
        if labels_BS is None:
            return ModelOutput(None, self.lm_head(*hiddens), routings)
        if train_logprobs:
            found = self.lm_head(*hiddens, labels_BS=[labels_BS], temperature=temperature, train_logprobs=True)
            logprobs_BS, entropy_BS = (values_T.view(labels_BS.shape) for values_T in found)
            return ModelOutput(None, None, routings, None, logprobs_BS, entropy_BS)
        labels = [labels_BS]
        for reach_BS in reach:
            labels_BS = shift_left(labels_BS, IGNORED_LABEL)
            labels.append(labels_BS.masked_fill(~reach_BS, IGNORED_LABEL))
        loss_sum, *ahead = self.lm_head(*hiddens, labels_BS=labels, temperature=temperature)
        logprobs_BS = None if temperature is None else ahead.pop().view(labels[0].shape)
        return ModelOutput(loss_sum, None, routings, torch.stack(ahead).mean() if ahead else None, logprobs_BS)
