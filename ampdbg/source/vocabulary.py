"""Which names in source code are tensor operations, and of what kind."""

from __future__ import annotations

PRODUCTS = frozenset(
    """matmul mm bmm mv dot vdot vecdot einsum inner outer tensordot chain_matmul multi_dot linear bilinear addmm
    addmv addbmm baddbmm addr conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu
    scaled_dot_product_attention multi_head_attention_forward""".split()
)
"""What autocast runs in half: most of a model's time. Never moved to FP32 unless it is itself pinned."""

MOVES = frozenset(
    """view view_as reshape reshape_as contiguous transpose permute movedim swapaxes swapdims flatten unflatten ravel
    squeeze unsqueeze expand expand_as repeat repeat_interleave tile broadcast_to chunk split tensor_split unbind
    narrow select index_select take_along_dim gather roll flip t T mT H mH adjoint cat concat concatenate stack hstack
    vstack pad unfold diagonal tril triu detach clone to float double half bfloat16 type type_as cpu cuda data real
    long int bool""".split()
)
"""What only moves, repeats or casts values: nothing overflows there, and FP32 gains nothing."""

SHARES_MEMORY = frozenset(
    """view view_as reshape reshape_as contiguous transpose permute movedim swapaxes swapdims flatten unflatten ravel
    squeeze unsqueeze expand expand_as broadcast_to chunk split tensor_split unbind narrow select unfold diagonal
    detach t T mT H mH data real to type float half""".split()
)
"""What may hand out the memory of the tensor that it is asked of, and no copy."""

JOINS = frozenset("cat concat concatenate stack hstack vstack dstack".split())
"""What makes one tensor of a list of them."""

CREATES = frozenset(
    """zeros ones empty full arange linspace logspace eye tensor as_tensor zeros_like ones_like empty_like full_like
    new_zeros new_ones new_empty new_full new_tensor one_hot finfo iinfo device Size""".split()
)

TRANSPOSED = frozenset({"T", "mT", "H", "mH"})
"""Attributes that are a view of a tensor."""

METADATA = frozenset(
    """shape dtype device ndim size dim numel nelement stride layout names is_cuda is_floating_point is_contiguous
    is_complex requires_grad requires_grad_ element_size item tolist grad grad_fn is_leaf get_device""".split()
)
"""What a tensor says of itself; the same in half and in FP32, but for ``dtype``, which then keeps its meaning."""

TENSOR_METHODS = PRODUCTS | frozenset(
    """sum nansum mean prod std var norm softmax log_softmax logsumexp exp exp2 expm1 log log2 log10 log1p sqrt rsqrt
    pow square abs add sub mul div true_divide addcmul addcdiv neg reciprocal sigmoid tanh relu gelu clamp clip
    clamp_min clamp_max minimum maximum min max amax amin cumsum cumprod sin cos tan erf masked_fill where lerp dist
    cross sign round floor ceil logit sort argsort topk argmax argmin any all eq ne lt gt le ge scatter scatter_add
    index_add masked_select nonzero median quantile""".split()
)
"""Methods by which a name of unknown kind is taken to be a tensor."""

RANDOM = frozenset(
    """dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax bernoulli
    multinomial normal poisson rand randn randint randperm rand_like randn_like randint_like
    fractional_max_pool2d fractional_max_pool3d""".split()
)
"""What draws random numbers: their order must stay as it is."""

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

CASTS = frozenset({"float", "double", "half", "bfloat16"})
