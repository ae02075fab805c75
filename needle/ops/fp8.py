"""Products in FP8 (csrc/fp8.h), for layers and the head: operands in e4m3, gradients in e5m2, each
array times one power of two, from its largest element or a bound of it."""

from __future__ import annotations

from needle import _C
from needle._C import NDArray

MULTIPLE = 16  # of the sizes of products on CUDA
DEEPEST = 1024  # the depth that cuda/linear_fp8_hopper.cuh has room for
LARGEST = {0: 448.0, 1: 57344.0}  # of e4m3, of e5m2


def whole_sizes(*sizes: int) -> bool:
    """True if products of these sizes take FP8."""
    return all(size > 0 and size % MULTIPLE == 0 for size in sizes)


class Quantized:
    """Rows x (N, C) in FP8: x is `scale` times `rows`, rounded; `columns` is their transpose.

    gelu: 1 (erf) or 2 (tanh) quantizes gelu(x), and writes gelu'(x) to `dgelu`; 0 does not.
    dgelu without gelu: x dgelu is quantized, and the sums of its columns, of 128 rows each, are
    written to `sums` (ceil(N / 128), C), float32.
    largest: the largest |x|, or a number above it, if known.
    bound: |x| is at most the product of these two scales and this number.
    The last two save reading x twice."""

    def __init__(
        self,
        x: NDArray,
        e5m2: bool = False,
        gelu: int = 0,
        dgelu: NDArray | None = None,
        sums: NDArray | None = None,
        largest: NDArray | None = None,
        bound: tuple[NDArray | None, NDArray | None, float] = (None, None, 0.0),
    ) -> None:
        self.e5m2, self.dtype = int(e5m2), x.dtype
        self.rows, self.columns, self.scale = _C.fp8_quantize(
            x, gelu, dgelu, self.e5m2, largest, *bound, sums
        )

    @classmethod
    def from_parts(
        cls, dtype: str, rows: NDArray, columns: NDArray, scale: NDArray, e5m2: bool = False
    ) -> Quantized:
        """As a kernel wrote it, of rows whose dtype would be `dtype`."""
        made = cls.__new__(cls)
        made.e5m2, made.dtype = int(e5m2), dtype
        made.rows, made.columns, made.scale = rows, columns, scale
        return made


class ProductFP8:
    """y = r + x w + b of rows x (N, K) and w (K, M);  dx = d w^T,  dw += x^T d (float32). Keeps
    what the backward reads: x by columns, and w."""

    def forward(
        self,
        x: Quantized,
        w: Quantized,
        b: NDArray | None = None,
        r: NDArray | None = None,
        into: NDArray | None = None,
    ) -> NDArray:
        """b: M elements; r (N, M); into: y of another product, in the place of r."""
        n, m = x.rows.shape[0], w.rows.shape[1]
        y = _C.empty((n, m), x.dtype, x.rows.device) if into is None else into
        operands = (x.rows, 0, x.scale, w.columns, 0, w.scale)
        _C.fp8_matmul(*operands, b, r, int(into is not None), y)
        self.x, self.x_scale = x.columns, x.scale
        self.w, self.w_scale = w.rows, w.scale
        return y

    def forward_gelu(
        self, x: Quantized, w: Quantized, b: NDArray, gelu: int, largest: NDArray | None
    ) -> tuple[Quantized, NDArray]:
        """gelu(x w + b), of the form `gelu` of Quantized, and gelu'(x w + b). largest: a bound of
        |x w + b|, if known: with it this is one op, up to the depth DEEPEST."""
        if largest is None or x.rows.shape[1] > DEEPEST:
            pre = self.forward(x, w, b)
            dgelu = _C.empty(pre.shape, pre.dtype, pre.device)
            return Quantized(pre, gelu=gelu, dgelu=dgelu, largest=largest), dgelu
        self.x, self.x_scale = x.columns, x.scale
        self.w, self.w_scale = w.rows, w.scale
        operands = (x.rows, x.scale, w.columns, w.scale, b, largest, int(gelu == 2))
        *parts, dgelu = _C.fp8_linear_gelu_fwd(*operands)
        return Quantized.from_parts(x.dtype, *parts), dgelu

    def input_grad_gelu(self, d: Quantized, dgelu: NDArray, db: NDArray | None) -> Quantized:
        """input_grad(d) dgelu, whose column sums are added to db (float32); d is in e5m2."""
        bound = self.input_grad_bound(d)
        if bound[0] is None or self.w.shape[1] > DEEPEST:
            parts = (-(-d.rows.shape[0] // 128), dgelu.shape[1])
            sums = _C.empty(parts, "float32", dgelu.device)
            made = Quantized(self.input_grad(d), True, 0, dgelu, sums, bound=bound)
            if db is not None:
                _C.bias_bwd(sums, db, None)
            return made
        operands = (d.rows, d.scale, self.w, self.w_scale, dgelu, bound[2], db)
        return Quantized.from_parts(d.dtype, *_C.fp8_linear_gelu_bwd(*operands), e5m2=True)

    def input_grad(self, d: Quantized) -> NDArray:
        dx = _C.empty((d.rows.shape[0], self.w.shape[0]), d.dtype, self.w.device)
        operands = (d.rows, d.e5m2, d.scale, self.w, 0, self.w_scale)
        _C.fp8_matmul(*operands, None, None, 0, dx)
        return dx

    def input_grad_bound(self, d: Quantized) -> tuple[NDArray | None, NDArray | None, float]:
        """A bound of input_grad(d), as Quantized takes it: far above its largest element, for which
        e5m2 has room, but known without reading it. None in float16, which infinities end in: a
        bound would make them finite."""
        if d.dtype == "float16":
            return None, None, 0.0
        terms = self.w.shape[1]
        return d.scale, self.w_scale, terms * LARGEST[d.e5m2] * LARGEST[0]

    def weight_grad(self, d: Quantized, into_and_beta: tuple[NDArray, int]) -> None:
        into, beta = into_and_beta
        operands = (self.x, 0, self.x_scale, d.columns, d.e5m2, d.scale)
        _C.fp8_matmul(*operands, None, None, beta, into)
