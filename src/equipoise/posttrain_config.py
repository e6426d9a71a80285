"""Settings of post-training. Apart from the package `posttrain`, which is imported only by its command."""

from pydantic import Field, PositiveInt

from equipoise.config import Config


class PosttrainConfig(Config):
    """Reinforcement learning with verifiable rewards (`equipoise posttrain`): GRPO on groups of answers. A step of
    `train.steps` generates `train.global_batch_size` answers of at most `train.sequence_length` tokens with their
    prompts, and learns from them."""

    prompts: str = Field("copy", min_length=1)
    """A `.jsonl` file with a prompt and an answer in each line, or a built-in task: `copy` (repeat two letters) or
    `addition` (of two numbers up to 99). The tokenizer, `data.shuffle`, `data.eval_fraction` and `data.max_documents`
    are those of the section data; its source is not read."""
    prompt_column: str = Field("prompt", min_length=1)
    """Field of each line with the prompt: a text, or a list of messages for the tokenizer's chat template."""
    answer_column: str = Field("answer", min_length=1)
    """Field of each line with the answer, a text or a number, that the reward compares with."""
    reward: str = Field("exact_match", min_length=1)
    """`exact_match`, `number_match` (the last number of the text) or `character_match` (share of the characters), or
    your own function as my_file.py:function or module:function: from prompt, answer and text to a number."""
    num_generations: int = Field(8, ge=2)
    """Answers to each prompt, which are compared with each other: the group. Divides train.global_batch_size."""
    max_new_tokens: PositiveInt = 32
    """Tokens of an answer at most; a longer one is cut there (truncated)."""
    temperature: float = Field(1.0, gt=0, le=10)
    """Of sampling, and of the log-probabilities that are trained. Evaluation takes the most likely token."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates on the answers of a step, each on its own share of the prompts. With more than one, the later
    ones are off-policy, which clipping bounds."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """A probability ratio below 1 - clip_low gets no gradient that would lower it further."""
    clip_high: float = Field(0.28, ge=0)
    """A probability ratio above 1 + clip_high gets no gradient that would raise it further."""
    scale_rewards: bool = True
    """Divides advantages by the standard deviation of their group; without, easy and hard prompts weigh as they are."""
    importance_cap: float | None = Field(2.0, gt=0)
    """Each token is weighed by the trainer's probability over the engine's, at most this; none leaves it out."""
    mask_truncated: bool = False
    """Leaves truncated answers out of the loss; their rewards still count in their group."""
    replay_routes: bool = True
    """Training sends each token to the experts that generated it."""
    max_running_requests: PositiveInt = 64
    """Answers that a rank generates at a time; each needs memory for train.sequence_length keys and values."""
