"""The training loop on one rank: steps, evaluation, checkpoints, metrics, and a clean stop."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from equipoise.checkpoint.hf.load import load_weights
from equipoise.checkpoint.layout import WENT_BACK, refuse_unwritable, set_newer_aside, step_path
from equipoise.checkpoint.resume import other_model
from equipoise.checkpoint.sizes import in_words
from equipoise.checkpoint.training import (
    CheckpointSaver,
    TrainingState,
    choose_checkpoint,
    load_checkpoint,
    refuse_existing,
)
from equipoise.data import Datasets, Loader, build_dataset, eval_batches
from equipoise.distributed.agree import raise_together, raised_by_all, together
from equipoise.distributed.collectives import all_reduce_sum
from equipoise.distributed.mesh import build_meshes
from equipoise.distributed.watch import bounded
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError, NonFiniteLossError
from equipoise.kernels.grouped_linear import choose_grouped_linear
from equipoise.models.config import model_changes
from equipoise.models.parallelize import build_parallel_model
from equipoise.observe.profiler import FOLDER as PROFILES
from equipoise.observe.profiler import Profiler
from equipoise.run_files import CHECKPOINTS
from equipoise.train.config import TrainConfig, plan_run, synthetic_workload
from equipoise.train.console import TrainConsole
from equipoise.train.graph import graph_problem, setting_problem
from equipoise.train.memory import refuse_too_large_together
from equipoise.train.metrics import FILE_NAME, MetricsWriter
from equipoise.train.optimizer import build_optimizer, learning_rate
from equipoise.train.progress import ByteProgress
from equipoise.train.record import StepRecorder
from equipoise.train.step import StepResult, TrainStep, run_model
from equipoise.train.stop import StopSignals
from equipoise.train.timing import PhaseTimer, StepTimes

if TYPE_CHECKING:
    from equipoise.observe.recorder import LoadRecorder

logger = logging.getLogger(__name__)
LAST_LINE_S = 2.0
"""Allowed for the device to be done with the last step of a run that has failed, so that its line can be written."""


class _Unlogged(NamedTuple):
    """A step whose line is not written yet."""

    times: StepTimes
    write: Callable[..., None]  # may be given what an evaluation found


class StepData(Protocol):
    """What steps are made from, with a position that a checkpoint holds. See `Loader`."""

    def next_step(self) -> list[Any]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Trainer:
    """Builds everything that a run needs from its configuration and runs it. Every method is collective.

    What a step learns from is in `_make_loader`, `_learn` and `evaluate`, which post-training replaces.
    """

    loader: StepData

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        datasets: Datasets | None,
        run_dir: Path,
        stop: StopSignals,
    ) -> None:
        self.config, self.world, self.datasets, self.run_dir = config, world, datasets, run_dir
        self.stop = stop
        loop = config.train
        self.plan = plan_run(config, world.size)
        self.dtype = compute_dtype(config, world)
        self.meshes = build_meshes(self.plan.axes, world)
        refuse_too_large_together(config, self.plan, world)
        with world.operation("build the model", deadline_s=10 * world.timeout_s):
            self.model = build_parallel_model(
                config.model,
                self.meshes,
                world.device,
                loop.seed,
                compute_dtype=self.dtype,
                dispatcher=config.parallel.dispatcher,
                expert_kernel=loop.expert_kernel,
                recompute=loop.recompute,
                compile=loop.compile,
                reshard_after_forward=self.plan.axes.reshards(config.parallel),
                balance=config.balance,
                initialize=config.model.load_from is None,
                dispatch=config.dispatch,
                timeout_s=config.parallel.timeout_s,
                overlap_shared_experts=config.parallel.overlap_shared_experts,
            )
        space = self.model.symmetric_space
        self._end_check = (lambda: None) if space is None else world.watch.add_check(space.check)
        world.accelerator.manual_seed(loop.seed + world.rank)
        self.optimizer = build_optimizer(self.model, config.optimizer, world.accelerator)
        self.loader = self._make_loader()
        self.timer = PhaseTimer(world.accelerator)
        self.step_runner = TrainStep(
            self.model,
            self.optimizer,
            self.meshes,
            world.device,
            self.timer,
            config.optimizer.max_grad_norm,
            operation=world.operation,
            captures=self._can_capture(),
        )
        self.workload = synthetic_workload(config, self.plan.axes)
        self.step = 0
        self.metrics_position = 0
        self.last_record: dict[str, Any] = {}
        self.logs_late = world.device.type != "cpu"
        """Whether a step is logged when the next one has been made, so that the host need not wait for its update."""
        self._waiting: _Unlogged | None = None
        self.trace: LoadRecorder | None = None
        self.resumed_from: Path | None = None
        self.went_back_to: int | None = None
        kept = config.checkpoint
        self.saver = CheckpointSaver(run_dir / CHECKPOINTS, world, kept.keep_last, kept.keep_every)

    def _can_capture(self) -> bool:
        """Whether `train.cuda_graph` is on and possible; says why not, but for a CPU, which nobody waits for."""
        if not self.config.train.cuda_graph:
            return False
        kernel = choose_grouped_linear(self.world.device, self.dtype, self.config.train.expert_kernel).name
        problem = setting_problem(self.config) or graph_problem(
            self.model, self.optimizer, self.world.accelerator, kernel
        )
        if problem is not None and self.world.device.type != "cpu":
            logger.info("train.cuda_graph has no effect: %s", problem)
        return problem is None

    def run(self) -> None:
        """Trains from the current state to the last step; always leaves a checkpoint of where it stopped.

        Raises:
            NonFiniteLossError: on every rank, with the state before the bad step saved.
        """
        recorder = StepRecorder(self.config, self.plan, self.world, self.dtype)
        if self.resumed_from is not None:
            logger.info("resuming after step %d from %s", self.step, self.resumed_from)
        for line in recorder.describe(self.model):
            logger.info(line)
        loop = self.config.train
        if self.step >= loop.steps:
            logger.info("nothing to train: step %d is done and train.steps is %d; raise it", self.step, loop.steps)
        self._claim_folder()
        with ExitStack() as stack:
            stack.callback(self.loader.close)
            stack.callback(self.saver.close)
            stack.callback(self._end_check)
            self.trace = self._load_recorder()
            if self.trace is not None:
                stack.callback(self.trace.close)
            writer = stack.enter_context(self._metrics_writer())
            console = stack.enter_context(TrainConsole(loop.steps, self.world.rank, first_step=self.step))
            profiler = Profiler(self.config.profiler, self.world.accelerator, self.run_dir / PROFILES, self.world.rank)
            stack.enter_context(profiler)
            stack.push(self._log_at_error)
            log = partial(self._log, recorder, writer, console)
            while self.step < loop.steps:
                with profiler.step(self.step + 1):
                    result, lr, times = self._train_step(recorder)
                self._log_waiting()
                self.saver.advance(result.saving)
                stopping, last = result.stop_requested, self.step == loop.steps
                self._waiting = _Unlogged(times, partial(log, self.step, result, lr, times, last or stopping))
                if last or bool(loop.eval_every and self.step % loop.eval_every == 0):
                    evaluated = self.evaluate()
                    self._waiting = self._waiting._replace(write=partial(self._waiting.write, evaluated))
                every = self.config.checkpoint.every
                saves = last or stopping or bool(every and self.step % every == 0)
                if saves or not self.logs_late:
                    self._log_waiting()
                if saves:
                    if writer is not None:
                        writer.sync()
                    self.save(wait=last or stopping or not self.config.checkpoint.async_save)
                if stopping:
                    break
            self._finish(console)

    def _make_loader(self) -> StepData:
        assert self.datasets is not None
        loop = self.config.train
        return Loader(
            self.datasets.train,
            loop.global_batch_size,
            self.plan.micro_batch_size,
            self.world.rank,
            self.world.size,
            loop.seed,
            self.config.data.shuffle,
        )

    def _metrics_writer(self) -> AbstractContextManager[MetricsWriter | None]:
        """The writer on rank 0; errors in making it (a missing package) are raised on every rank."""
        writer, error = None, None
        if self.world.rank == 0:
            try:
                config = self.config.model_dump(mode="json")
                writer = MetricsWriter(self.run_dir, self.config.metrics, self.step, config)
                if writer.position < self.metrics_position:
                    logger.warning(
                        "%s has lost lines of steps up to %d: it had %d bytes when the checkpoint was saved, now it "
                        "has %d. Training is not affected",
                        writer.path,
                        self.step,
                        self.metrics_position,
                        writer.position,
                    )
            except Exception as e:
                error = e
        raise_together(error, self.world)
        return writer if writer is not None else nullcontext()

    def _load_recorder(self) -> "LoadRecorder | None":
        """The recorder of the load trace, where one is wanted and the model has MoE layers."""
        if self.config.trace is None or not self.step_runner.layers:
            return None
        from equipoise.train.trace import make_recorder

        return make_recorder(self.config, self.plan, self.world, self.step_runner, self.dtype, self.run_dir, self.step)

    def _log_waiting(self) -> None:
        """Logs the step before, if it is not logged yet. The times of a step are known when the device is done with it,
        which the host does not wait for: it begins the next one. A checkpoint holds all lines up to its step."""
        waiting, self._waiting = self._waiting, None  # what was refused, by a full disk, is not tried again
        if waiting is not None:
            waiting.write()

    def _log_at_error(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        """Where the run fails, the line of its last step is still written, unless the device does not answer."""
        if error is None or self._waiting is None or self.world.rank != 0:
            return
        if bounded(self._waiting.times.wait, LAST_LINE_S) == (True, None):
            with suppress(Exception):  # the run's own error is what counts
                self._log_waiting()

    def _log(
        self,
        recorder: StepRecorder,
        writer: MetricsWriter | None,
        console: TrainConsole,
        step: int,
        result: StepResult,
        lr: float,
        times: StepTimes,
        always: bool,
        evaluated: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        record = self._record(recorder, result, lr, times) | dict(evaluated)
        if writer is None or not (always or evaluated or step % self.config.metrics.log_every == 0):
            return
        console.update(writer.write(step, record))
        self.metrics_position = writer.position
        self.last_record = record

    def _record(self, recorder: StepRecorder, result: StepResult, lr: float, times: StepTimes) -> dict[str, Any]:
        """A step's line of the metrics."""
        return recorder.record(result, lr, times.seconds())

    def _finish(self, console: TrainConsole) -> None:
        files = {
            "run folder": self.run_dir,
            "metrics": self.run_dir / FILE_NAME,
            "checkpoint": step_path(self.run_dir / CHECKPOINTS, self.step),
        }
        stopped = self.step < self.config.train.steps
        console.finish(
            self.step,
            self.last_record.get("loss"),
            files=files,
            ended="stopped by a signal; the state is saved" if stopped else "finished",
        )

    def _claim_folder(self) -> None:
        """Before the first step: on rank 0, what is newer than the state that the run starts from is set aside, and a
        folder that cannot be written is refused; raised on every rank."""
        error: Exception | None = None
        directory = self.run_dir / CHECKPOINTS
        if self.world.rank == 0:
            try:
                refuse_unwritable(directory)
                if self.resumed_from is not None:
                    aside = set_newer_aside(directory, self.step, self.run_dir / FILE_NAME)
                    if aside is not None:
                        logger.warning(
                            "checkpoints of steps after %d, which are trained again, are now in %s", self.step, aside
                        )
            except OSError as e:
                error = CheckpointError(
                    f"cannot write checkpoints into {directory}: {e.strerror or e}. Check space and permissions, or "
                    "choose another run folder with --out"
                )
        raise_together(error, self.world)

    def _train_step(self, recorder: StepRecorder) -> tuple[StepResult, float, StepTimes]:
        """One step; returns its result, learning rate and times. The device may be at the update still. On a non-finite
        loss saves the state before the step and raises."""
        step = self.step + 1
        # The first step may compile and warm up: it gets more time before a rank counts as missing.
        is_first = recorder.steps_recorded == 0 and self._waiting is None
        deadline_s = 10 * self.world.timeout_s if is_first else None
        if self.workload is not None:
            self.step_runner.lay_down_routing(self.workload, self.step)
        loader_state = self.loader.state_dict()
        with self.world.operation(f"step {step}", deadline_s=deadline_s):
            self.timer.start_step()
            if self.trace is not None:
                self.trace.begin(step)
            lr = learning_rate(self.config.optimizer, step, self.config.train.steps)
            result = self._learn(step, lr)
            if self.trace is not None:
                self.trace.end()
            times = self.timer.end_step()
        if not result.is_finite:
            self._refuse_step(step, result, loader_state)
        self.step = step
        return result, lr, times

    def _learn(self, step: int, lr: float) -> StepResult:
        """Takes the data of a step and makes the update, unless its result is not finite."""
        with self.timer.phase("data"):
            batches = self.loader.next_step()
        local_tokens = float(sum(b.num_valid_tokens for b in batches))
        num_tokens = max(1, int(all_reduce_sum([local_tokens], self.world.group)[0]))
        sums, counts_NLE = self.step_runner.forward_backward(batches, num_tokens)
        with self.timer.phase("optimizer"):
            return self.step_runner.finish(
                sums, counts_NLE, num_tokens, lr, bool(self.stop.requested), self.saver.progress
            )

    def _refuse_step(self, step: int, result: StepResult, loader_state: dict[str, Any]) -> None:
        self._log_waiting()
        saved = self.save(loader_state)
        raise NonFiniteLossError(
            f"step {step}: the loss is {result.loss} and the gradient norm {result.grad_norm}. The update was not "
            f"made; the state after step {step - 1} is saved in {saved}. Lower optimizer.lr, raise "
            "optimizer.warmup_steps, or look at the data of this step, then run again with --resume"
        )

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out loss per token and per byte; touches nothing that training counts. Empty without held-out data."""
        assert self.datasets is not None
        if self.datasets.held_out is None:
            return {}
        loop, world = self.config.train, self.world
        loss, tokens, num_bytes = torch.zeros((), device=world.device), 0, 0
        with world.operation(f"step {self.step}: evaluation", deadline_s=10 * world.timeout_s):
            with self._inference():
                for batch in eval_batches(
                    self.datasets.held_out,
                    loop.eval_sequences,
                    self.plan.micro_batch_size,
                    world.rank,
                    world.size,
                ):
                    output = run_model(self.model, batch, world.device)
                    assert output.loss_sum is not None
                    loss += output.loss_sum
                    tokens += batch.num_valid_tokens
                    num_bytes += batch.num_bytes
            total, tokens_sum, bytes_sum = all_reduce_sum(
                [loss.double(), torch.tensor(float(tokens), device=world.device), float(num_bytes)],
                world.group,
            )
        return {
            "eval_loss": float(total) / max(1.0, float(tokens_sum)),
            "eval_nats_per_byte": float(total) / max(1.0, float(bytes_sum)),
        }

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """For forwards without a backward."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()
        for module in self.model.modules():  # parameters kept whole for a backward that never comes
            if isinstance(module, FSDPModule):
                module.reshard()

    def _state(self, loader_state: dict[str, Any] | None = None) -> TrainingState:
        return TrainingState(
            model=self.model,
            optimizer=self.optimizer,
            step=self.step,
            seed=self.config.train.seed,
            loader=loader_state or self.loader.state_dict(),
            config=self.config.model_dump(mode="json"),
            metrics_position=self.metrics_position,
            extra={WENT_BACK: self.went_back_to},
        )

    def save(self, loader_state: dict[str, Any] | None = None, wait: bool = True) -> Path:
        """Saves the state after `self.step` steps, unless it is saved already; returns its folder. Without `wait` it
        is written while training goes on."""
        if self.trace is not None:
            self.trace.flush()
        return self.saver.save(self._state(loader_state), wait)

    @raised_by_all()
    def restore(self, resume: bool, resume_step: int | None = None) -> None:
        """Takes up the newest complete checkpoint of the run folder, if there is one, or that of `resume_step`;
        without `resume` refuses to start where there is one. Writes nothing.

        A run without one starts from the weights of `model.load_from`, if that is set.

        Raises:
            CheckpointError, DataError: on every rank, if it is there against the wish, missing, damaged, or of
                another model or data.
        """
        directory = self.run_dir / CHECKPOINTS
        if not resume:
            refuse_existing(directory, self.world)
        else:
            self.resumed_from = choose_checkpoint(directory, self.world, resume_step, self.config.checkpoint.verify)
        if self.resumed_from is None:
            self._load_pretrained()
            return
        restored = load_checkpoint(self.resumed_from, self._state(), self.world)
        changes = model_changes(restored.config.get("model", {}), self.config.model.model_dump(mode="json"))
        if changes and not self.config.checkpoint.allow_other_model:
            raise other_model(self.resumed_from, changes)
        together(lambda: self.loader.load_state_dict(restored.loader), self.world)
        self.step, self.metrics_position = restored.step, restored.metrics_position
        self.saver.last_step = restored.step
        self.went_back_to = restored.extra.get(WENT_BACK) if resume_step is None else resume_step

    def _load_pretrained(self) -> None:
        folder = self.config.model.load_from
        if folder is not None:
            with ByteProgress(f"load {folder.name}", shown=self.world.rank == 0) as progress:
                num_bytes = load_weights(self.model, self.config.model, folder, self.world, progress)
            logger.info("loaded weights from %s: %s on this rank", folder, in_words(num_bytes))


def build_datasets(config: TrainConfig, world: World) -> Datasets:
    """The sequences of `config`, which every rank reads; collective: an error of one is raised on all."""
    loop = config.train
    build = partial(build_dataset, vocab_size=config.model.vocab_size, seed=loop.seed)
    return together(lambda: build(config.data, loop.sequence_length), world)


def compute_dtype(config: TrainConfig, world: World) -> torch.dtype:
    """The dtype that `train.precision` means on this device."""
    precision = config.train.precision
    if precision == "auto":
        on_device = world.device.type != "cpu" and bool(world.accelerator.supports("bf16"))
        precision = "bfloat16" if on_device else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
