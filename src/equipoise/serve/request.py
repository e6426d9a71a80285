"""What a client asks of the engine and what it gets: values that cross processes as JSON."""

from typing import Any, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from equipoise.config import Config

MAX_SEED = 2**63 - 1


class SamplingParams(Config):
    """How tokens are drawn; the names of SGLang's `sampling_params`."""

    temperature: float = Field(1.0, ge=0)
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Draws among the most likely tokens whose probabilities add to at least this."""
    top_k: int = Field(-1, ge=-1)
    """Draws among so many of the most likely tokens; -1 or 0: all."""
    max_new_tokens: NonNegativeInt | None = 128
    """Tokens to generate at most; None: as many as a slot holds, where the default stops as well. 0 only computes the
    prompt."""
    min_new_tokens: NonNegativeInt = 0
    """No stop token is drawn before so many."""
    stop_token_ids: list[int] | None = None
    """Tokens that end the text, beside the engine's end-of-sequence token."""
    ignore_eos: bool = False
    """Whether the engine's end-of-sequence token is a token like others."""
    sampling_seed: int | None = Field(None, ge=0, le=MAX_SEED)
    """Makes the drawn tokens repeat whatever else is in the batch; None: a seed of the engine's choice."""
    n: int = Field(1, ge=1, le=1)
    """Only 1: send the prompt several times, its prefix is computed once."""
    stop: list[str] | str | None = Field(None, max_length=0)
    """Stop texts are not supported: give stop_token_ids."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of `text`."""
    spaces_between_special_tokens: bool = True
    """Taken as it is said, and ignored."""
    no_stop_trim: bool = False
    """Taken as it is said, and ignored: a stop token is always part of output_ids."""


class GenerateRequest(Config):
    """Body of `POST /generate`."""

    input_ids: list[int] | None = None
    """The prompt's token ids."""
    text: str | None = None
    """The prompt as text; needs an engine with a tokenizer."""
    sampling_params: SamplingParams = SamplingParams()
    """How tokens are drawn."""
    rid: str | None = Field(None, min_length=1, max_length=200)
    """The request's name, for abort_request; None: one of the engine's choice."""
    return_logprob: bool = False
    """Whether to return the log-probability of each output token at the stated temperature (at 1 where it is 0), before
    top-p and top-k."""
    logprob_start_len: int = Field(-1, ge=-1)
    """With return_logprob: the first prompt position whose log-probability is returned; -1: none."""
    return_routed_experts: bool = False
    """Whether to return the experts of every token that was computed: all but the last."""
    routed_experts_start_len: NonNegativeInt = 0
    """The first token whose experts are returned."""
    stream: bool = False
    """Must be false."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("give either input_ids or text")
        if self.text is not None:
            try:
                self.text.encode()
            except UnicodeEncodeError as error:  # half of a pair in JSON's escapes
                raise ValueError(f"text is not Unicode at character {error.start}: {error.reason}") from None
        if self.stream:
            raise ValueError("stream is true: this engine answers when a request is finished")
        return self


class Prompt(Config):
    """A checked request as the engine's ranks take it."""

    rid: str
    ids: list[int] = Field(min_length=1)
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_new_tokens: int
    stop_ids: list[int]
    """Every token that ends the text, the end-of-sequence token too unless it is ignored."""
    seed: int
    logprobs: bool
    logprob_start: int
    """First prompt position whose log-probability is wanted; the prompt's length: none."""
    routes: bool
    routes_start: int


class Finished(Config):
    """What became of a prompt.

    versions: [weight version, output tokens drawn under it], in order.
    routes: base64 of the ids [rows, MoE layers, top-k], `routes_dtype`; rows are all tokens but the last, from
        `routes_start`.
    """

    rid: str
    output_ids: list[int]
    finish: dict[str, Any]
    output_logprobs: list[float] = []
    input_logprobs: list[float] = []
    prompt_tokens: PositiveInt
    cached_tokens: NonNegativeInt
    version: str
    versions: list[tuple[str, int]]
    routes: str | None = None
    routes_dtype: str | None = None
    routes_shape: list[int] | None = None
