"""Training loops with one misuse each. The line to blame ends with a comment that is the code."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from tests.zoo_misuse.parts import Parts, amp, scaled, scaler_of


def clip_before_unscale(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.model(x).square().mean()
        scaler.scale(loss).backward()
        clip_grad_norm_(parts.model.parameters(), 1.0)  # misuse-clip-scaled
        scaler.step(parts.optimizer)
        scaler.update()


def clip_before_unscale_while_the_scale_is_logged(parts: Parts) -> None:
    for scaler in scaled(parts):
        assert scaler.state_dict()["scale"] == scaler.get_scale()
        clip_grad_norm_(parts.model.parameters(), 1.0)  # misuse-clip-scaled
        scaler.step(parts.optimizer)
        scaler.update()


def bare_step_while_the_scale_is_logged(parts: Parts) -> None:
    for scaler in scaled(parts):
        assert scaler.get_scale()
        parts.optimizer.step()  # misuse-bare-step


def update_between_unscale_and_a_step(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.other_optimizer.zero_grad()
        scaler.scale(parts.other(x * parts.model(x)).square().mean()).backward()
        scaler.unscale_(parts.optimizer)
        scaler.unscale_(parts.other_optimizer)
        scaler.step(parts.optimizer)
        scaler.update()  # misuse-many-updates
        scaler.step(parts.other_optimizer)
        scaler.update()


def clip_values_before_unscale(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        clip_grad_value_(parameters=parts.model.parameters(), clip_value=0.5)  # misuse-clip-scaled
        scaler.step(parts.optimizer)
        scaler.update()


def bare_step(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        parts.optimizer.step()  # misuse-bare-step


def bare_step_then_update(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        parts.optimizer.step()  # misuse-bare-step
        scaler.update()


def bare_step_on_inf(parts: Parts) -> None:
    for scaler in scaled(parts, infinite=2):
        scaler.unscale_(parts.optimizer)
        parts.optimizer.step()  # misuse-bare-step
        scaler.update()


def bare_step_of_a_wrapped_optimizer_on_inf(parts: Parts) -> None:
    """As in sharpness-aware training, whose optimizer steps the one that it wraps by itself."""
    outer = torch.optim.SGD(parts.model.parameters(), lr=0.01)
    for scaler in scaled(parts, infinite=2):
        scaler.unscale_(outer)
        parts.optimizer.step()  # misuse-bare-step
        scaler.update()


def bare_step_without_update(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.unscale_(parts.optimizer)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        parts.optimizer.step()  # misuse-bare-step


def bare_step_behind_the_scalers(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.step(parts.optimizer)
        scaler.update()
        parts.optimizer.step()  # misuse-bare-step


def unscaled_loss_of_the_other(parts: Parts) -> None:
    """As in a GAN whose generator trains while its discriminator is frozen."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.other.requires_grad_(False)
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.other(x.sin() * parts.model(x)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(parts.optimizer)
        parts.other.requires_grad_(True)
        parts.other_optimizer.zero_grad()
        with amp():
            loss = (parts.other(x).square().mean() + F.softplus(parts.other(x * parts.model(x).detach())).mean()) * 0.5
        loss.backward()  # misuse-unscaled-loss
        scaler.step(parts.other_optimizer)
        scaler.update()


def unscaled_losses_of_a_window(parts: Parts) -> None:
    for number, scaler in enumerate(scaled(parts)):
        scaler.step(parts.optimizer)
        with amp():
            loss = parts.other(parts.batches[number]).square().mean() / 2
        loss.backward()  # misuse-unscaled-loss
        if number % 2:
            scaler.unscale_(parts.other_optimizer)
            clip_grad_norm_(parts.other.parameters(), 1.0)
            scaler.step(parts.other_optimizer)
            parts.other_optimizer.zero_grad()
        scaler.update()


def no_loss_is_scaled(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.model(x).square().mean().backward()
        scaler.step(parts.optimizer)  # misuse-unscaled-loss
        scaler.update()


def unscale_twice(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.unscale_(parts.optimizer)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        scaler.unscale_(parts.optimizer)  # misuse-unscale-twice
        scaler.step(parts.optimizer)
        scaler.update()


def unscale_after_step(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.step(parts.optimizer)
        scaler.unscale_(parts.optimizer)  # misuse-unscale-twice
        scaler.update()


def no_update(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.step(parts.optimizer)  # misuse-no-update


def no_update_with_clipping(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.unscale_(parts.optimizer)  # misuse-no-update
        clip_grad_norm_(parts.model.parameters(), 1.0)
        scaler.step(parts.optimizer)


def unscale_in_window(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        scaler.scale(parts.model(x).square().mean() / 2).backward()
        scaler.unscale_(parts.optimizer)  # misuse-accumulate
        clip_grad_norm_(parts.model.parameters(), 1.0)
        if number % 2 == 0:
            scaler.step(parts.optimizer)
            parts.optimizer.zero_grad()
        scaler.update()


def unscale_in_window_update_at_end(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        scaler.scale(parts.model(x).square().mean() / 2).backward()
        scaler.unscale_(parts.optimizer)  # misuse-accumulate
        if number % 2 == 0:
            scaler.step(parts.optimizer)
            scaler.update()
            parts.optimizer.zero_grad()


def update_in_window(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        scaler.scale(parts.model(x).square().mean() / 2).backward()
        if number % 2 == 0:
            scaler.step(parts.optimizer)
            parts.optimizer.zero_grad()
        scaler.update()  # misuse-accumulate


def update_in_the_window_of_another(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches, start=1):
        parts.other_optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean() + parts.other(x).square().mean()).backward()
        scaler.step(parts.other_optimizer)
        if number % 2 == 0:
            scaler.step(parts.optimizer)
            parts.optimizer.zero_grad()
        scaler.update()  # misuse-accumulate


def never_cleared(parts: Parts) -> None:
    """No step is skipped: each step's gradients, unscaled, are added to the next one's, which are not yet."""
    scaler = scaler_of(parts)
    for x in parts.batches:
        scaler.scale(parts.model(x).square().mean()).backward()  # misuse-accumulate
        scaler.step(parts.optimizer)
        scaler.update()


def never_cleared_windows(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        loss = parts.model(x).square().mean() / 2
        if number % 2 == 0:
            scaler.scale(loss).backward()  # misuse-accumulate
            continue
        scaler.scale(loss).backward()
        scaler.unscale_(parts.optimizer)
        clip_grad_norm_(parts.model.parameters(), 1.0)
        scaler.step(parts.optimizer)
        scaler.update()


def cleared_by_the_wrong_model(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.other.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()  # misuse-accumulate
        scaler.step(parts.optimizer)
        scaler.update()


def stale_gradients(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for number, x in enumerate(parts.batches):
        loss = parts.model(x).square().mean() * (1e38 if number == 1 else 1.0)
        scaler.scale(loss).backward()  # misuse-stale-gradients
        before = scaler.get_scale()
        scaler.step(parts.optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            parts.optimizer.zero_grad()


def half_parameters(parts: Parts) -> None:
    scaler = scaler_of(parts)
    parts.model.half()
    for x in parts.batches:
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x.half()).float().square().mean()).backward()
        scaler.step(parts.optimizer)  # misuse-half-parameters
        scaler.update()


def no_scaler(parts: Parts) -> None:
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.model(x).float().square().mean()
        loss.backward()  # misuse-no-scaler
        parts.optimizer.step()


def scaler_for_bfloat16(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp(torch.bfloat16):
            loss = parts.model(x).float().square().mean()
        scaler.scale(loss).backward()  # misuse-scaler-bfloat16
        scaler.step(parts.optimizer)
        scaler.update()


def unused_optimizer(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.step(parts.optimizer)
        scaler.step(parts.other_optimizer)  # misuse-unused-optimizer
        scaler.update()


def update_after_each(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        parts.other_optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean()).backward()
        scaler.scale(parts.other(x).square().mean()).backward()
        scaler.step(parts.optimizer)
        scaler.update()  # misuse-many-updates
        scaler.step(parts.other_optimizer)
        scaler.update()


def update_again(parts: Parts) -> None:
    for scaler in scaled(parts):
        scaler.step(parts.optimizer)
        scaler.update()
        scaler.update()  # misuse-many-updates


def scheduler_on_skips(parts: Parts) -> None:
    scaler = scaler_of(parts)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(parts.optimizer, 10)
    for number, x in enumerate(parts.batches * 2):
        parts.optimizer.zero_grad()
        scaler.scale(parts.model(x).square().mean() * (1e38 if number % 2 else 1.0)).backward()
        scaler.step(parts.optimizer)
        scaler.update()
        scheduler.step()  # misuse-scheduler-on-skip


def scheduler_on_a_first_skip(parts: Parts) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(parts.optimizer, 10)
    for scaler in scaled(parts, infinite=2):
        scaler.step(parts.optimizer)
        scaler.update()
        scheduler.step()  # misuse-scheduler-on-skip


class Projection(torch.autograd.Function):
    """x @ w; the ops of its forward are lowered by autocast, those of its backward are not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad  # misuse-custom-function


def custom_function(parts: Parts) -> None:
    scaler = scaler_of(parts)
    weight = nn.Parameter(torch.ones(1, 2))
    for x in parts.batches:
        with amp():
            loss = Projection.apply(parts.model(x), weight).float().square().mean()
        scaler.scale(loss).backward()


def custom_function_caught(parts: Parts) -> None:
    with contextlib.suppress(RuntimeError):
        custom_function(parts)


def backward_in_autocast(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        with amp():
            loss = parts.model(x).float().square().mean()
            scaler.scale(loss).backward()  # misuse-backward-in-autocast
        scaler.step(parts.optimizer)
        scaler.update()


def bce(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        with amp():
            loss = F.binary_cross_entropy(parts.model(x).sigmoid(), torch.ones(4, 1))  # misuse-bce
        scaler.scale(loss).backward()


def gradient_penalty(parts: Parts) -> None:
    scaler = scaler_of(parts)
    for x in parts.batches:
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        [grad] = torch.autograd.grad(  # misuse-gradient-penalty
            scaler.scale(loss), [parts.weight], create_graph=True
        )
        scaler.scale(loss + 1e-12 * grad.square().sum()).backward()
        scaler.step(parts.optimizer)
        scaler.update()
