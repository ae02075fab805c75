"""Faults in cuda/, those that take the longest to compile first. Each names the tests that see it;
every file with code in it has one."""

from planted.fault import Fault

OPS = "tests/csrc/test_ops.py"
PIECES = "tests/ops/test_attention_pieces.py"
BAD = "tests/csrc/test_bad_inputs.py"
CUDA = "tests/csrc/test_cuda.py"
DOWNLOAD = "tests/csrc/test_download.py"
GENERATE = "tests/test_generate.py"

FAULTS = [
    # ---- what every file includes ----
    Fault(
        "cuda/common.cuh",
        "return x == x ? (int64_t)x : 0; }",
        "return (int64_t)x; }",
        "tests/csrc/test_ndarray.py -k out_of_range",
    ),
    Fault(
        "cuda/common.cuh",
        "return ((uintptr_t)p & 15) == 0; }",
        "return ((uintptr_t)p & 7) == 0; }",
        f"{OPS} -k begin_anywhere",
    ),
    # ---- a debug build ----
    Fault("cuda/checks.cu", "if (f.from_data) {", "if (false) {", "tests/kernels/test_checked.py"),
    # ---- products with GELU ----
    Fault(
        "cuda/linear_gelu.cu",
        "checked(slope + i) = derivative(x);",
        "",
        f"{OPS} -k linear_gelu_fwd",
    ),
    Fault(
        "cuda/linear_hopper.cu",
        "word[4 * p + 2 + h] = is_odd() ? y.y : got;",
        "word[4 * p + 2 + h] = is_odd() ? got : y.y;",
        f"{OPS} -k linear_gelu_bwd",
    ),
    Fault(
        "cuda/linear_shallow_hopper.cu",
        "            sums[h] += __shfl_xor_sync(~0u, sums[h], 2);\n",
        "",
        f"{OPS} -k linear_gelu_bwd",
    ),
    Fault("cuda/gelu.cuh", "0.5f + copysignf(0.5f - r, x)}", "r}", f"{OPS} -k linear_gelu_fwd"),
    # ---- the product with rotary ----
    Fault(
        "cuda/linear_shallow_hopper.cu",
        "x[e] * cosine - y[e] * sine;",
        "x[e] * cosine + y[e] * sine;",
        f"{OPS} -k 'test_structured and not views and linear_rotary_fwd'",
    ),
    Fault(
        "cuda/linear_rotary.cu",
        "a->cos, a->sin, 1.0f);",
        "a->cos, a->sin, -1.0f);",
        f"{OPS} -k 'test_structured and not views and linear_rotary_fwd'",
    ),
    Fault(
        "cuda/linear_rotary.cu",
        "        product.b = &b;\n",
        "",
        f"{OPS} -k 'test_structured and not views and linear_rotary_fwd'",
    ),
    # ---- attention ----
    Fault(
        "cuda/attention.cuh",
        "int end = p.causal ? min(keys.end, row + p.offset + 1) : keys.end;",
        "int end = p.causal ? min(keys.end, row + p.offset) : keys.end;",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    Fault(
        "cuda/attention.cuh",
        "float high = 2 * w + 1 < count ?",
        "float high = 2 * w < count ?",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    Fault(
        "cuda/attention.cuh",
        "if (offsets->shape[1] != blocks + 1) {",
        "if (offsets->shape[1] > blocks + 1) {",
        f"{BAD} -k 'refused and block_sparse'",
    ),
    Fault(
        "cuda/attention.cuh",
        "int first = section * p.heads_together;",
        "int first = 0 * section;",
        f"{PIECES} -k float32",
    ),
    Fault(
        "cuda/mma.cuh",
        '"r"(inside ? 16 : 0)',
        '"r"(16)',
        f"{OPS} -k 'test_structured and not views and attention'",
    ),
    Fault(
        "cuda/attention_bwd.cu",
        "if (p.causal && first_key + 15 > tile.begin + p.offset) {",
        "if (p.causal && first_key > tile.begin + p.offset) {",
        f"{OPS} -k 'test_structured and not views and attention_bwd'",
    ),
    Fault(
        "cuda/attention_bwd.cu",
        "min((int64_t)p.B * times, (blockIdx.y + 1) * chunk);",
        "min((int64_t)times, (blockIdx.y + 1) * chunk);",
        f"{OPS} -k 'test_structured and not views and attention_bwd'",
    ),
    Fault(
        "cuda/attention_bwd.cu",
        "dp[i][j] = s[i][j] * (dp[i][j] - stat.y);",
        "dp[i][j] = s[i][j] * dp[i][j];",
        f"{OPS} -k 'test_structured and not views and attention_bwd'",
    ),
    Fault(
        "cuda/attention_fwd.cu",
        "p.flip = p.scale_log2 < 0.0f ? 0x80008000u : 0u;",
        "p.flip = 0u;",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    Fault(
        "cuda/attention_fwd.cu",
        "float total = sum[mi][half] * shrink;",
        "float total = sum[mi][half];",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    Fault(
        "cuda/attention_fwd.cu",
        "float shift = top == -INFINITY ? 0.0f : top;",
        "float shift = top;",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    # ---- the device ----
    Fault(
        "cuda/device.cuh",
        "            lock->unlock();\n",
        "            lock = nullptr;\n",
        f"{CUDA} -k properties",
    ),
    Fault("cuda/device.cu", "    case cudaErrorIllegalAddress:\n", "", f"{CUDA} -k fatal"),
    Fault(
        "cuda/device.cu",
        "if (whole > 48 * 1024) {",
        "if (whole > 128 * 1024) {",
        f"{OPS} -k 'test_structured and not views and attention_fwd'",
    ),
    Fault("cuda/backend.cu", "    d.live_bytes = d.peak_bytes = 0;\n", "", f"{CUDA} -k reset"),
    Fault(
        "cuda/backend.cu",
        "out->arch = prop.major * 10 + prop.minor;",
        "out->arch = prop.major;",
        f"{CUDA} -k properties",
    ),
    Fault("cuda/event.cu", "    event->recorded = true;\n", "", f"{CUDA} -k events"),
    Fault(
        "cuda/event.cu",
        "if (!from->recorded || !to->recorded) {",
        "if (!from->recorded && !to->recorded) {",
        f"{CUDA} -k events",
    ),
    Fault(
        "cuda/graph.cu",
        "    if (graph->capturing) {\n"
        "        return nd_error(ND_ECUDA,\n"
        '                        "graph: the captured run allocates',
        "    if (false) {\n"
        "        return nd_error(ND_ECUDA,\n"
        '                        "graph: the captured run allocates',
        f"{GENERATE} -k test_graph",
    ),
    Fault(
        "cuda/graph.cu",
        "    d.recording = d.recording == graph ? nullptr : d.recording;\n",
        "",
        f"{GENERATE} -k test_graph",
    ),
    Fault(
        "cuda/memory.cu",
        "    d.live_bytes -= (int64_t)bytes.count;\n",
        "",
        f"{CUDA} -k memory_stats",
    ),
    Fault(
        "cuda/memory.cu",
        "        found->second.late = true;\n        return ND_OK;\n",
        "        return ND_OK;\n",
        f"{GENERATE} -k test_graph",
    ),
    Fault(
        "cuda/module.cu",
        "cluster->val.clusterDim.x = launch->cluster[0];",
        "cluster->val.clusterDim.x = 1;",
        "tests/kernels/test_module.py -k cluster",
    ),
    Fault(
        "cuda/transfer.cu",
        '    ND_TRY(cuda_refuse_in_capture(device, "upload"));\n',
        "",
        f"{GENERATE} -k test_graph",
    ),
    Fault(
        "cuda/transfer.cu",
        "if (capacity >= bytes && capacity <= 2 * bytes + 4096) {",
        "if (capacity <= 2 * bytes + 4096) {",
        DOWNLOAD,
    ),
    # ---- ops ----
    Fault(
        "cuda/copy.cu",
        "size / 8, (int)(size % 8));",
        "size / 8, 0);",
        f"{OPS} -k 'assign_converts and bfloat16'",
    ),
    Fault(
        "cuda/copy.cu",
        "fits = loop.strides[k][d] % n == 0;",
        "fits = loop.strides[k][d] != 0;",
        f"{CUDA} -k views_of_many",
    ),
    Fault(
        "cuda/cross_entropy_long.cu",
        "load(row + slots * (int64_t)gridDim.x, slot);",
        "load(row + (int64_t)gridDim.x, slot);",
        "tests/ops/test_loss.py -k a_loss_of_more_rows",
    ),
    Fault(
        "cuda/cross_entropy.cu",
        "*loss = valid > 0.0f ? sum / valid : 0.0f;",
        "*loss = sum / valid;",
        f"{OPS} -k 'test_structured and not views and cross_entropy'",
    ),
    Fault(
        "cuda/cross_entropy.cu",
        "target >= columns ? NAN",
        "target > columns ? NAN",
        f"{BAD} -k cannot_look_at",
    ),
    Fault(
        "cuda/decode.cu",
        "const int64_t chunk = ceil_div<int64_t>(position, s.splits);",
        "const int64_t chunk = position / s.splits;",
        f"{OPS} -k 'test_structured and not views and decode_attention'",
    ),
    Fault(
        "cuda/decode.cu",
        "(b.value == a.value && b.at < a.at);",
        "(b.value == a.value && b.at > a.at);",
        f"{OPS} -k 'test_structured and not views and decode_greedy'",
    ),
    Fault(
        "cuda/dilated.cu",
        "(p.t % max(segment, 1) - p.h) % max(dilation, 1) == 0;",
        "(p.t - p.h) % max(dilation, 1) == 0;",
        f"{OPS} -k 'test_structured and not views and dilated_sum'",
    ),
    Fault(
        "cuda/dilated.cu",
        "if (next == -INFINITY) {",
        "if (one == INFINITY) {",
        f"{OPS} -k 'test_structured and not views and dilated_merge'",
    ),
    Fault(
        "cuda/elementwise.cu",
        "(O *)a.out, size / N,\n                       (int)(size % N));",
        "(O *)a.out, size / N,\n                       (int)(size % N) - 1);",
        f"{OPS} -k 'test_elementwise and add'",
    ),
    Fault(
        "cuda/elementwise.cu",
        "        for (int d = 0; d < last; d++) {\n            if (loop.strides[k][d] % count",
        "        for (int d = 1; d < last; d++) {\n            if (loop.strides[k][d] % count",
        f"{CUDA} -k views_of_many",
    ),
    Fault(
        "cuda/embedding.cu",
        "            (first > 0 && keys[first - 1] == key)) {",
        "            false) {",
        f"{OPS} -k 'test_structured and not views and embedding_bwd'",
    ),
    Fault(
        "cuda/embedding.cu",
        "checked(keys + i) = id >= 0 && id < vocabulary ?",
        "checked(keys + i) = id < vocabulary ?",
        f"{BAD} -k cannot_look_at",
    ),
    Fault(
        "cuda/layernorm.cu",
        "            if ((i * group + lane) * N < columns) {\n",
        "            if (row < rows) {\n",
        f"{OPS} -k 'test_structured and not views and layernorm_fwd'",
    ),
    Fault(
        "cuda/layernorm.cu",
        "                    if (y > 0) {\n",
        "                    if (y > 1) {\n",
        f"{OPS} -k 'test_structured and not views and layernorm_bwd'",
    ),
    Fault(
        "cuda/matmul.cu",
        "key.stride_c = p.batch > 1 ? p.m * p.n : 0;",
        "key.stride_c = p.batch > 1 ? p.n : 0;",
        f"{OPS} -k 'test_structured and not views and matmul'",
    ),
    Fault(
        "cuda/matmul.cu",
        "key.ldb = p.a.ld;",
        "key.ldb = p.k;",
        f"{OPS} -k 'test_structured_views and matmul_acc'",
    ),
    Fault(
        "cuda/optimizer.cu",
        "if (blockIdx.x == 0 && threadIdx.x < count - pieces * N) {",
        "if (blockIdx.x == 0 && threadIdx.x + 1 < count - pieces * N) {",
        f"{OPS} -k 'grad_norm or in_the_norm'",
    ),
    Fault(
        "cuda/optimizer.cu",
        "if (!isfinite(root)) {",
        "if (isnan(root)) {",
        f"{OPS} -k broken_gradient",
    ),
    Fault(
        "cuda/reduce.cu",
        "return q_wins || (!p_wins && q.index < p.index) ? q : p;",
        "return q_wins || (!p_wins && q.index > p.index) ? q : p;",
        f"{OPS} -k 'test_reductions and argmax'",
    ),
    Fault(
        "cuda/common.cuh",
        "__uint_as_float(x & 0xffff0000));",
        "__uint_as_float(x));",
        f"{OPS} -k 'test_reductions and max and bfloat16'",
    ),
    Fault(
        "cuda/rotary.cu",
        "(slices - heads * s.parts) * s.slice",
        "(slices - heads) * s.slice",
        f"{OPS} -k 'test_structured and not views and rotary'",
    ),
    Fault(
        "cuda/block_lists.cu",
        "at + __popc(found & below);",
        "at + __popc(found & ~below);",
        f"{OPS} -k 'test_structured and block_lists'",
    ),
    Fault(
        "cuda/block_lists.cu",
        "(mask * (kept.columns + 1) + kept.columns - count)",
        "(mask * (kept.columns + 1) + count)",
        f"{OPS} -k 'test_structured and block_lists'",
    ),
    # ---- Hopper, which tests/emulation tries without a GPU ----
    Fault(
        "cuda/hopper.cu",
        "shape[axis + 1] == 1 ? 16 :",
        "shape[axis + 1] == 1 ? 0 :",
        f"{OPS} -k 'test_structured and attention'",
    ),
    Fault(
        "cuda/attention.cuh",
        "min(block, blocks - 1) * p.tiles_per_block",
        "min(block, blocks) * p.tiles_per_block",
        "tests/emulation -k order_of_work",
    ),
    Fault(
        "cuda/attention_hopper.cuh",
        "int first = section * p.heads_together;",
        "int first = 0 * section;",
        "tests/emulation -k 'test_forward and sections'",
    ),
    Fault(
        "cuda/attention_fwd_hopper.cu",
        "sum[half] *= shrink[half];",
        "",
        "tests/emulation -k test_forward",
    ),
    Fault(
        "cuda/attention_fwd_hopper.cu",
        "tile + (following < 0)",
        "tile + (following < 0 && tile > 0)",
        "tests/emulation -k test_forward",
    ),
    Fault(
        "cuda/attention_bwd_hopper.cu",
        "second = second * cos - before * sin;",
        "second = second * cos - first * sin;",
        "tests/emulation -k 'test_backward and turned'",
    ),
    Fault(
        "cuda/attention_bwd_hopper.cu",
        "const bool upper = threadIdx.x & 2 * KEPT;",
        "const bool upper = threadIdx.x & KEPT;",
        "tests/emulation -k test_sums",
    ),
    Fault(
        "cuda/attention_bwd_hopper.cu",
        "(rows[1] ? c[at + 2] : 0.0f);",
        "c[at + 2];",
        "tests/emulation -k test_sums",
    ),
    Fault(
        "cuda/attention_bwd_hopper.cu",
        "Shape::KEYS ? distance + row > column :",
        "Shape::KEYS ? distance + row >= column :",
        "tests/emulation -k test_backward",
    ),
    Fault(
        "cuda/attention_bwd_hopper.cu",
        "column > min(distance + row, last);",
        "column > distance + row;",
        "tests/emulation -k 'test_backward and low'",
    ),
]
