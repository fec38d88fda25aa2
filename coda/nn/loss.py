"""A linear layer and the cross entropy of its outputs, which are never stored whole, or only for the backward.

The backward runs a chunk of the vocabulary at a time, so that the gradient of the logits is never there whole.
``memory="fast"``: the forward stores the logits in the dtype of the operands; for each chunk one pass turns them into
their gradient, and two plain products follow. ``memory="low"``: the forward stores one number for each row; each chunk
computes its logits again. docs/loss.md has both in full.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coda.dtypes import from_torch
from coda.errors import CodaError
from coda.nn.operands import as_rows, check_same_dtype, run
from coda.passes.differentiate import MEMORY
from coda.pytorch.block import one_line

REDUCTIONS = ("none", "sum", "mean")
DEFAULTS: dict[str, Any] = {
    "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0, "z_loss": 0.0, "softcap": None,
    "memory": "fast", "check_labels": False,
}  # fmt: skip
CHECKED = ("reduction", "memory", "label_smoothing", "softcap")


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory: str = "fast",
    check_labels: bool = False,
) -> Tensor:
    """``cross_entropy(x @ weight.T + bias, target)`` in f32, with derivatives.

    ``x``: [..., K], ``weight``: [V, K], ``bias``: [V], in bf16, f16 or f32; ``target``: [...] of int64 or int32.
    ``class_weight``: [V] and ``label_smoothing`` are those of ``torch.nn.functional.cross_entropy``, as is the mean:
    over the rows that are not ignored, or divided by the class weights of their labels; NaN where there are none.
    ``token_weight``: [...] multiplies the loss of each row, not the divisor of the mean. ``z_loss`` adds
    ``z_loss * lse**2`` to each row (Chowdhery et al. 2022). ``softcap`` makes the logits
    ``softcap * tanh(z / softcap)`` (Gemma 2). ``memory``: see the module.

    Returns f32: a scalar, or with ``reduction="none"`` the shape of ``target``. A row labelled ``ignore_index`` counts
    for nothing: its loss and gradients are 0, also where all are. A target that is no class gives NaN;
    ``check_labels=True`` raises CodaError instead, for which it waits for the device.
    """
    _check_options(reduction, memory, label_smoothing, softcap)
    check_same_dtype(x, weight=weight, bias=bias)
    rows, labels = as_rows(x, weight), target.reshape(-1)
    if target.dtype not in (torch.int64, torch.int32):
        raise CodaError.of(f"the target is {target.dtype}", "class indices of int64 or int32")
    if target.shape != x.shape[:-1]:
        raise CodaError.of(f"the target has shape {list(target.shape)}, the rows of x {list(x.shape[:-1])}")
    operands = {"x": rows, "w": weight, "target": labels}
    if bias is not None:
        operands["bias"] = _vector(bias, "bias", weight.shape[0])
    if class_weight is not None:
        operands["class_weight"] = _vector(class_weight, "class_weight", weight.shape[0]).detach().float()
        if label_smoothing:
            operands["all_classes"] = operands["class_weight"].sum()
    if token_weight is not None:
        operands["token_weight"] = _vector(token_weight.reshape(-1), "token_weight", rows.shape[0]).float()
    if check_labels:
        _check_labels(labels, weight.shape[0], ignore_index)
    sizes = {"M": rows.shape[0], "K": weight.shape[1], "V": weight.shape[0]}
    dtypes = tuple((n, t.dtype) for n, t in operands.items())
    text = program_text(dtypes, ignore_index, reduction, label_smoothing, z_loss, softcap)
    result = run(text, operands, sizes, memory)
    return result.view(target.shape) if reduction == "none" else result


@torch.compiler.assume_constant_result
def program_text(
    dtypes: tuple[tuple[str, torch.dtype], ...],
    ignore: int,
    reduction: str,
    smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> str:
    """The program of the loss, with what is asked for and no more."""
    dims = {"x": "M, K", "w": "V, K", "bias": "V", "class_weight": "V", "token_weight": "M", "target": "M"}
    dims |= {"all_classes": ""}
    given = {name for name, _ in dtypes}
    parameters = ", ".join(f"{name}: {from_torch(dtype)}[{dims[name]}]" for name, dtype in dtypes)
    logits = "x @ w.T" + (" + bias" if "bias" in given else "")
    hard, soft, one = "lse - pick(z, V, target)", "lse - mean(z, V)", "1.0"
    if "class_weight" in given:
        one = "pick(class_weight, V, target)"
        hard = f"({hard}) * {one}"
        soft = "(lse * all_classes - sum(class_weight * z, V)) / size(V)"
    nll = f"{1 - smoothing!r} * ({hard}) + {smoothing!r} * ({soft})" if smoothing else hard
    if z_loss:
        nll = f"{nll} + {z_loss!r} * lse * lse"
    if "token_weight" in given:
        nll = f"({nll}) * token_weight"
    results = {
        "none": "nll",
        "sum": "sum(nll, M)",
        "mean": f"sum(nll, M) / sum(where(target == {ignore}, 0.0, {one}), M)",
    }
    return one_line(f"""program linear_cross_entropy({parameters}) {{
        z = {f"softcap({logits}, {softcap!r})" if softcap else logits}
        lse = logsumexp(z, V)
        nll = by_label({nll}, target, {ignore}, size(V))
        return loss = {results[reduction]}: f32
    }}""")


def _check_options(reduction: str, memory: str, label_smoothing: float, softcap: float | None) -> None:
    for name, value, known in (("reduction", reduction, REDUCTIONS), ("memory", memory, MEMORY)):
        if value not in known:
            raise CodaError.of(f"{name} is {value!r}", f"one of {', '.join(known)}")
    if not 0 <= label_smoothing <= 1:
        raise CodaError.of(f"label_smoothing is {label_smoothing}", "it lies between 0 and 1")
    if softcap is not None and not softcap > 0:
        raise CodaError.of(f"softcap is {softcap}", "it is positive, or None")


def _vector(x: Tensor, name: str, length: int) -> Tensor:
    if x.shape != (length,):
        raise CodaError.of(f"'{name}' has shape {list(x.shape)}, expected [{length}]")
    return x


def _check_labels(labels: Tensor, classes: int, ignore: int) -> None:
    """Raises CodaError that names the first label which is no class."""
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise CodaError.of(
            f"the target of row {row} is {int(labels[row])}, which is none of {classes} classes",
            f"a row that shall count for nothing is labelled {ignore} (ignore_index)",
        )


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as the last layer of a model: owns ``weight``: [V, K] and maybe ``bias``: [V].

    A module of its own, so that FSDP (``fully_shard``) gathers the weight around it. The keywords are those of the
    function.
    """

    def __init__(
        self,
        in_features: int,
        classes: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ):
        super().__init__()
        if unknown := options.keys() - DEFAULTS.keys():
            raise CodaError.of(f"there is no option {sorted(unknown)[0]}", f"there are {', '.join(DEFAULTS)}")
        _check_options(**{name: (DEFAULTS | options)[name] for name in CHECKED})
        self.options = options
        linear = nn.Linear(in_features, classes, bias, device=device, dtype=dtype)
        self.weight, self.bias = linear.weight, linear.bias

    @classmethod
    def of(cls, linear: nn.Linear, **options: Any) -> LinearCrossEntropy:
        """On the parameters of a linear layer, an ``lm_head`` say, which may be tied to others."""
        module = cls(1, 1, device="meta", **options)
        module.weight, module.bias = linear.weight, linear.bias
        return module

    def forward(
        self, x: Tensor, target: Tensor, class_weight: Tensor | None = None, token_weight: Tensor | None = None
    ) -> Tensor:
        """The loss of rows ``x``: [..., K] with labels ``target``: [...]."""
        return linear_cross_entropy(
            x, self.weight, target, self.bias, class_weight=class_weight, token_weight=token_weight, **self.options
        )

    def extra_repr(self) -> str:
        classes, features = self.weight.shape
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"in_features={features}, classes={classes}, bias={self.bias is not None}{options}"
