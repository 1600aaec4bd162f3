"""The healthy twins: the same loops in the right order, and legal ones that look like a misuse."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.zoo_misuse.parts import Parts, amp, scaled, scaler_of, train, train_and_clear


def plain(parts: Parts) -> None:
    train(parts, lambda x: parts.model(x).square().mean())


def bare_steps_on_other_gradients(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.zero_grad(set_to_none=number % 2 == 0)
        parts.optimizer.step()  # nothing but weight decay
        parts.model(x).square().mean().backward()
        parts.optimizer.step()


def clip_after_unscale(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.unscale_(parts.optimizer)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        clip_grad_value_(parts.model.parameters(), 0.5)
        scaler.step(parts.optimizer)
        scaler.update()


def clip_to_a_scaled_limit(parts: Parts) -> None:
    for scaler in scaled(parts):
        clip_grad_norm_(parts.model.parameters(), 1.0 * scaler.get_scale())
        scaler.step(parts.optimizer)
        scaler.update()


def norm_by_a_limit_of_inf(parts: Parts) -> None:
    for scaler in scaled(parts):
        clip_grad_norm_(parts.model.parameters(), float("inf"))
        scaler.step(parts.optimizer)
        scaler.update()


def clip_without_scaler(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.model(x).square().mean().backward()
        clip_grad_norm_(parts.model.parameters(), 1.0)
        parts.optimizer.step()


def bare_step_for_the_other(parts: Parts) -> None:
    """One model in FP32 beside one with a scaler; the scaled loss reaches both."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.model(x).square().mean().backward()
        parts.optimizer.step()
        parts.other_optimizer.zero_grad()
        scaler.scale((parts.other(x) * parts.model(x)).square().mean()).backward()
        scaler.step(parts.other_optimizer)
        scaler.update()


def scaled_by_hand_for_the_other(parts: Parts) -> None:
    """By the scaler's scale, asked for or read; by a number; by a tensor that a scaled loss has given a gradient."""
    scaler = scaler_of(parts)
    fixed = scaler.get_scale()
    for number, x in enumerate(parts.batches):
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.step(parts.optimizer)
        parts.other_optimizer.zero_grad()
        with amp():
            loss = parts.other(x).square().mean()
        if number % 2 == 0:
            (loss * fixed).backward()
        else:
            (loss * (scaler._scale if number % 3 else scaler.get_scale())).backward()
        scaler.step(parts.other_optimizer)
        scaler.update()


def gradients_handed_on(parts: Parts) -> None:
    """The scaled loss goes backward to what the other model has made, and that gradient into the other model."""
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        parts.optimizer.zero_grad()
        parts.other_optimizer.zero_grad()
        with amp():
            made = parts.other(x)
            cached = made.detach().requires_grad_()
            loss = parts.model(cached * x).square().mean()
        scaler.scale(loss).backward()
        assert cached.grad is not None
        if number % 3 == 0:
            made.backward(cached.grad)
        elif number % 3 == 1:
            (made * cached.grad).sum().backward()
        else:
            torch.dot(made.flatten().float(), cached.grad.flatten().float()).backward()
        scaler.step(parts.optimizer)
        scaler.step(parts.other_optimizer)
        scaler.update()


class Scaling(torch.autograd.Function):
    """Multiplies what goes backward by the loss scale."""

    @staticmethod
    def forward(context: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 1024.0


def scaled_by_a_function(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.step(parts.optimizer)
        parts.other_optimizer.zero_grad()
        Scaling.apply(parts.other(x).square().mean()).backward()
        scaler.step(parts.other_optimizer)
        scaler.update()


def unscaled_by_hand(parts: Parts) -> None:
    for _ in scaled(parts):
        with torch.no_grad():
            for parameter in parts.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 1024.0
        parts.optimizer.step()


def unscaled_by_hand_through_data(parts: Parts) -> None:
    for scaler in scaled(parts):
        scale = scaler.get_scale()
        for gradient in parts.gradients:
            gradient.data.div_(scale)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        parts.optimizer.step()


def bare_step_unless_inf(parts: Parts) -> None:
    for scaler in scaled(parts, infinite=2):
        scaler.unscale_(parts.optimizer)
        if clip_grad_norm_(parts.model.parameters(), 1.0).isfinite():
            parts.optimizer.step()
        scaler.update()


def bare_step_of_a_wrapped_optimizer(parts: Parts) -> None:
    outer = torch.optim.SGD(parts.model.parameters(), lr=0.01)
    for scaler in scaled(parts):
        scaler.unscale_(outer)
        parts.optimizer.step()
        scaler.update()


def half_weights_without_a_scaler(parts: Parts) -> None:
    """A scaler would refuse their gradients."""
    parts.model.half()
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.model(x.half()).float().square().mean().backward()
        parts.optimizer.step()


def gan(parts: Parts) -> None:
    """Two optimizers, an update after each; the generator's loss reaches the discriminator's parameters."""
    scaler = scaler_of(parts)
    discriminator, generator = parts.other, parts.model
    for x in parts.batches:
        parts.other_optimizer.zero_grad()
        scaler.scale(discriminator(x).square().mean()).backward()
        scaler.step(parts.other_optimizer)
        scaler.update()
        parts.optimizer.zero_grad()
        scaler.scale(discriminator(generator(x).expand(-1, 3)).square().mean()).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def gan_that_skips(parts: Parts) -> None:
    """As before with gradients zeroed in place, one scaler each, and a skip of both."""
    scalers = [scaler_of(parts), scaler_of(parts)]
    for number, x in enumerate(parts.batches):
        factor = 1e38 if number == 2 else 1.0
        parts.other_optimizer.zero_grad(set_to_none=False)
        scalers[0].scale(parts.other(x).square().mean() * factor).backward()
        scalers[0].step(parts.other_optimizer)
        scalers[0].update()
        parts.optimizer.zero_grad(set_to_none=False)
        scalers[1].scale(parts.other(parts.model(x).expand(-1, 3)).square().mean() * factor).backward()
        scalers[1].step(parts.optimizer)
        scalers[1].update()


def several_optimizers_one_update(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        for optimizer in parts.optimizers:
            optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean() + parts.other(x).square().mean()).backward()
        for optimizer in parts.optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_([*parts.model.parameters(), *parts.other.parameters()], 1.0)
        for optimizer in parts.optimizers:
            scaler.step(optimizer)
        scaler.update()


def accumulate(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        scaler.scale(parts.model(x).square().mean() / 2).backward()
        if number % 2 == 0:
            scaler.unscale_(parts.optimizer)
            clip_grad_norm_(parts.model.parameters(), 1.0)
            scaler.step(parts.optimizer)
            scaler.update()
            parts.optimizer.zero_grad()


def cleared_after_a_skip(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        loss = parts.model(x).square().mean() * (1e38 if number in (1, 2) else 1.0)
        parts.model.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def never_cleared_without_a_scaler(parts: Parts) -> None:
    """Gradients that add up for ever mix no scales: wrong they are in FP32 too."""
    for x in parts.batches:
        parts.model(x).square().mean().backward()
        parts.optimizer.step()


def cleared_after_each_step(parts: Parts) -> None:
    train_and_clear(parts, parts.optimizer.zero_grad)


def cleared_by_the_model(parts: Parts) -> None:
    train_and_clear(parts, lambda: parts.model.zero_grad(set_to_none=False))


def cleared_one_by_one(parts: Parts) -> None:
    def clear() -> None:
        for gradient in parts.gradients:
            gradient.zero_()

    train_and_clear(parts, clear)


def cleared_by_leaving_none(parts: Parts) -> None:
    def clear() -> None:
        for parameter in parts.model.parameters():
            parameter.grad = None

    train_and_clear(parts, clear, micro_batches=2)


def cleared_unseen(parts: Parts) -> None:
    """Torch does not count what is written through ``data``: only the values tell."""

    def clear() -> None:
        for gradient in parts.gradients:
            gradient.data.zero_()

    train_and_clear(parts, clear)


def cleared_by_the_optimizer_itself(parts: Parts) -> None:
    """In its own step: nobody writes the gradients between the step and the next backward pass."""
    parts.optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad(set_to_none=False))
    train_and_clear(parts, lambda: None)


def optimizers_that_share_parameters(parts: Parts) -> None:
    """They take turns, and each clears what it has stepped on, for the other too."""
    scaler, turns = scaler_of(parts), [parts.optimizer, torch.optim.Adam(parts.model.parameters(), lr=0.01)]
    for number, x in enumerate(parts.batches):
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.step(turns[number % 2])
        scaler.update()
        turns[number % 2].zero_grad()


def one_loss_again_and_again(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for _ in range(2):
        loss = parts.model(parts.batches[0]).square().mean()
        for last in (False, False, True):
            parts.optimizer.zero_grad(set_to_none=last)
            scaler.scale(loss).backward(retain_graph=not last)
            if last:
                scaler.step(parts.optimizer)
                scaler.update()
    plain(parts)


def bfloat16_without_scaler(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp(torch.bfloat16):
            loss = parts.model(x).float().square().mean()
        loss.backward()
        parts.optimizer.step()


def bfloat16_with_a_disabled_scaler(parts: Parts) -> None:
    scaler = GradScaler("cpu", enabled=False)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp(torch.bfloat16):
            loss = parts.model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(parts.optimizer)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        scaler.step(parts.optimizer)
        scaler.update()


def half_teacher_of_a_float_student(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp(), torch.no_grad():
            target = parts.other(x).float()
        F.mse_loss(parts.model(x), target).backward()
        parts.optimizer.step()


def scaled_by_hand(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.model(x).float().square().mean()
        (loss * 1024.0).backward()
        with torch.no_grad():
            for parameter in parts.model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 1024.0
        parts.optimizer.step()


def scaled_by_the_first_gradient(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.model(x).float().square().mean()
        loss.backward(gradient=torch.tensor(1024.0))
        for gradient in parts.gradients:
            gradient.data.div_(1024.0)
        parts.optimizer.step()


def scheduler_unless_skipped(parts: Parts) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(parts.optimizer, 0.1, total_steps=10)
    for scaler in scaled(parts, infinite=2):
        scaler.step(parts.optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()


def scheduler_of_epochs(parts: Parts) -> None:
    """Each epoch's last step is skipped; a scheduler that moves once an epoch moves all the same."""
    scaler = scaler_of(parts)
    first = torch.optim.lr_scheduler.LinearLR(parts.optimizer, total_iters=2)
    second = torch.optim.lr_scheduler.StepLR(parts.optimizer, 2)
    chained = torch.optim.lr_scheduler.SequentialLR(parts.optimizer, [first, second], milestones=[2])
    for number, x in enumerate(parts.batches):
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean() * (1e38 if number % 3 == 2 else 1.0)).backward()
        scaler.step(parts.optimizer)
        scaler.update()
        if number % 3 == 2:
            chained.step()


class Projection(torch.autograd.Function):
    """x @ w in float32, forward and backward."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


def custom_function(parts: Parts) -> None:
    weight = nn.Parameter(torch.ones(1, 2))
    train(parts, lambda x: Projection.apply(parts.model(x), weight).float().square().mean())


def checkpointed(parts: Parts) -> None:
    """A checkpoint's own backward pass runs inside the loop's."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        for reentrant in (True, False):
            with amp():
                out = torch.utils.checkpoint.checkpoint(parts.model, x.requires_grad_(), use_reentrant=reentrant)
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def bce_with_logits(parts: Parts) -> None:
    train(parts, lambda x: F.binary_cross_entropy_with_logits(parts.model(x), torch.ones(4, 1)))


def gradient_penalty(parts: Parts) -> None:
    """As PyTorch's own example has it."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        [scaled] = torch.autograd.grad(scaler.scale(loss), [parts.weight], create_graph=True)
        grad = scaled * (1.0 / scaler.get_scale())
        scaler.scale(loss + grad.square().sum()).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def gradient_penalty_of_an_unscaled_loss(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        [grad] = torch.autograd.grad(loss, [parts.weight], create_graph=True)
        scaler.scale(loss + grad.square().sum()).backward()
        scaler.step(parts.optimizer)
        scaler.update()


def scaled_gradients_without_a_penalty(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        torch.autograd.grad(scaler.scale(loss), [parts.weight], retain_graph=True)
        scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        scaler.update()
