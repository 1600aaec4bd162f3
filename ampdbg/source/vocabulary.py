"""Names in source code that are no op of a tensor's: what it says of itself, and what Python offers."""

from __future__ import annotations

TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
"""Attributes that are a view of a tensor."""

METADATA = frozenset(
    """shape dtype device ndim size dim numel nelement stride layout names is_cuda is_floating_point is_contiguous
    is_complex requires_grad requires_grad_ element_size item tolist grad grad_fn is_leaf get_device""".split()
)
"""What a tensor says of itself; the same in half and in FP32, but for ``dtype``, which then keeps its meaning."""

TORCH_FUNCTIONS = ("torch", "torch.nn.functional", "torch.linalg", "torch.fft", "torch.special", "torch.Tensor")
"""Where the functions of tensors live; a call of anything else in torch (checkpoint) may run modules."""

PLAIN_MODULES = frozenset("math operator itertools functools typing warnings collections einops cmath numbers".split())
"""Modules whose functions run none of the user's."""

PLAIN_BUILTINS = frozenset(
    """len int float bool str range zip enumerate isinstance issubclass hasattr getattr min max list tuple dict set
    frozenset sorted reversed any all type slice round divmod id repr print iter next""".split()
)

VIEWS = frozenset({"items", "keys", "values"})
"""Methods of dicts that only hand out what they hold."""

BUILTIN_OPERATIONS = frozenset({"sum", "abs", "pow"})
"""Builtins that compute with tensors when they are given some."""

CONSUMERS = frozenset("sum list tuple max min any all sorted set dict".split())
"""Builtins that run a generator to its end before they return."""
