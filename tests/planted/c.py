"""Faults in csrc/: a comparison by one, a check that is gone, a reference that is kept, a missing
factor. Each names the tests that see it; every file of the C core has one."""

from planted.fault import Fault

OPS = "tests/csrc/test_ops.py"
NDARRAY = "tests/csrc/test_ndarray.py"
VALUES = "tests/csrc/test_ndarray_values.py"
BOUNDS = "tests/csrc/test_bounds.py"
BAD = "tests/csrc/test_bad_inputs.py"
LEAKS = "tests/csrc/test_leaks.py"
KERNELS = "tests/kernels/test_fake_device.py tests/kernels/test_signature.py"

FAULTS = [
    # ---- memory and views ----
    Fault(
        "csrc/array.c",
        "    *high = (uintptr_t)a->data + (uintptr_t)((last + 1) * item);",
        "    *high = (uintptr_t)a->data + (uintptr_t)(last * item);",
        f"{NDARRAY} {OPS} -k 'overlaps or setitem'",
    ),
    Fault(
        "csrc/array.c",
        "last + item > (__int128)a->storage->bytes",
        "last > (__int128)a->storage->bytes",
        f"{NDARRAY} -k 'make or view_errors'",
    ),
    Fault(
        "csrc/array.c",
        "shape[n - i] = left == 1 ? right : left;",
        "shape[n - i] = left > right ? left : right;",
        f"{OPS} -k broadcast_and_scalars",
    ),
    Fault(
        "csrc/array.c",
        "for (int k = 0; k < n && merge; k++) {",
        "for (int k = 0; k < 1 && merge; k++) {",
        f"{OPS} -k 'test_elementwise_views and add'",
    ),
    Fault(
        "csrc/array.c",
        "merged.shape[axis < lead ? 0 : last]",
        "merged.shape[axis <= lead ? 0 : last]",
        f"{OPS} -k 'test_structured and linear_rotary_fwd'",
    ),
    Fault(
        "csrc/status.c",
        "    vsnprintf(text, sizeof text, format, arguments);\n"
        "    va_end(arguments);\n"
        "    memcpy(message, text, sizeof text);",
        "    vsnprintf(message, sizeof text, format, arguments);\n    va_end(arguments);",
        f"{VALUES} -k errors",
    ),
    # ---- the extension module ----
    Fault(
        "csrc/python/arguments.c",
        "        seen |= 1u << axes[i];\n",
        "",
        f"{VALUES} {NDARRAY} -k 'reductions or view_errors'",
    ),
    Fault("csrc/python/arguments.c", "truncated >= 0x1p63", "truncated > 0x1p63", BOUNDS),
    Fault(
        "csrc/python/arguments.c",
        "what, &values[i]) < 0) {\n            Py_DECREF(items);",
        "what, &values[i]) < 0) {",
        f"{LEAKS} -k views_and_indexing",
    ),
    Fault(
        "csrc/python/array_likes.c",
        "*out = bytes <= 4 ? ND_I32 : ND_I64;",
        "*out = bytes < 4 ? ND_I32 : ND_I64;",
        VALUES,
    ),
    Fault(
        "csrc/python/array_likes.c",
        "if (natural && check_unsigned(any) < 0) {",
        "if (false && check_unsigned(any) < 0) {",
        BOUNDS,
    ),
    Fault(
        "csrc/python/backends.c",
        "return index >= 0 && index < ND_MAX_DEVICES ?",
        "return index >= 0 && index <= ND_MAX_DEVICES ?",
        "tests/csrc/test_device.py",
    ),
    Fault(
        "csrc/python/backends.c",
        "if (table == NULL || table->abi != nd_abi()) {",
        "if (table == NULL) {",
        "tests/house/test_backends.py -k refused",
    ),
    Fault(
        "csrc/python/callables.c",
        "        if (given[at] != NULL) {\n",
        "        if (false) {\n",
        f"{BAD} -k arguments",
    ),
    Fault(
        "csrc/python/copy.c",
        "if (a->strides[i] == 0 && a->shape[i] > 1 && nd_size(a) > 0) {",
        "if (a->strides[i] == 0 && a->shape[i] > 2 && nd_size(a) > 0) {",
        "tests/csrc/test_bind.py",
    ),
    Fault(
        "csrc/python/copy.c",
        "    if (nd_same_geometry(to, &wide)) {\n        result = 0;\n    } else if",
        "    if (to->data == wide.data) {\n        result = 0;\n    } else if",
        f"{NDARRAY} {OPS} -k 'setitem or overlaps'",
    ),
    Fault(
        "csrc/python/device.c",
        'return make != NULL ? Py_BuildValue("N(i)", make, device_of(self)->index) : NULL;',
        'return make != NULL ? Py_BuildValue("N(i)", make, 0) : NULL;',
        "tests/csrc/test_device.py",
    ),
    Fault(
        "csrc/python/device.c",
        '(long long)stats.live_bytes, "peak_bytes",\n'
        "                         (long long)stats.peak_bytes,",
        '(long long)stats.live_bytes, "peak_bytes",\n'
        "                         (long long)stats.live_bytes,",
        "tests/csrc/test_device.py",
    ),
    Fault(
        "csrc/python/dlpack.c",
        "        versioned->deleter(versioned);\n    }\n}\n\nstatic dl_device dlpack_device",
        "        (void)versioned;\n    }\n}\n\nstatic dl_device dlpack_device",
        f"{LEAKS} -k exchange",
    ),
    Fault(
        "csrc/python/dlpack.c",
        "read_only = versioned->flags & DL_READ_ONLY;",
        "read_only = versioned->flags & DL_COPIED;",
        f"{VALUES} -k exchange",
    ),
    Fault(
        "csrc/python/dlpack.c",
        "if ((uintptr_t)out->data % (uintptr_t)item != 0 && !empty) {",
        "if ((uintptr_t)out->data % 2 != 0 && !empty) {",
        f"{BOUNDS} {VALUES} -k 'dlpack or exchange'",
    ),
    Fault(
        "csrc/python/download.c",
        "    if (nd_is_contiguous(array)) {\n",
        "    if (nd_size(array) > 0) {\n",
        "tests/csrc/test_download.py",
    ),
    Fault(
        "csrc/python/elementwise.c",
        "return width[a] > width[b] ? a : b;",
        "return width[a] < width[b] ? a : b;",
        f"{VALUES} -k promotion",
    ),
    Fault(
        "csrc/python/elementwise.c",
        "(arrays[1] == NULL || nd_same_geometry(arrays[1], own) ||\n"
        "                  !nd_may_overlap(arrays[1], own));",
        "(arrays[1] == NULL || arrays[1]->ndim == own->ndim ||\n"
        "                  !nd_may_overlap(arrays[1], own));",
        f"{VALUES} -k operators",
    ),
    Fault(
        "csrc/python/elementwise.c",
        "done:\n    nd_array_clear(&view);\n    return result;",
        "done:\n    return result;",
        f"{LEAKS} -k 'every_differentiable_op or views'",
    ),
    Fault(
        "csrc/python/errors.c",
        "[ND_EINDEX] = PyExc_IndexError, [ND_EMEMORY] = PyExc_MemoryError,",
        "[ND_EINDEX] = PyExc_IndexError, [ND_EMEMORY] = PyExc_ValueError,",
        "tests/csrc/test_memory_failure.py",
    ),
    Fault(
        "csrc/python/errors.c",
        "(strncmp(what, op, length) == 0 && what[length] == ':')",
        "strncmp(what, op, 1) == 0",
        f"{VALUES} {BAD} -k 'errors or refuse'",
    ),
    Fault(
        "csrc/python/event.c",
        "if (!PyObject_TypeCheck(other_object, state->event_type) ||\n"
        "        self->head.device != other->head.device) {",
        "if (self == NULL || other == NULL) {",
        "tests/csrc/test_device.py",
    ),
    Fault("csrc/python/flat.c", "    at += at < 0 ? size : 0;\n", "", f"{NDARRAY} -k flat"),
    Fault(
        "csrc/python/flat.c",
        '        result = nd_assign(state, "setitem", a, &copy);\n',
        "",
        f"{NDARRAY} -k flat",
    ),
    Fault(
        "csrc/python/graph.c",
        "if (!PyCallable_Check(step)) {",
        "if (step == Py_None) {",
        "tests/test_generate.py -k records",
    ),
    Fault(
        "csrc/python/indexing.c",
        "if (at < -size || at >= size) {",
        "if (at < -size || at > size) {",
        f"{NDARRAY} -k index",
    ),
    Fault(
        "csrc/python/indexing.c",
        "        if (from->shape[at] != 1) {\n            return false;",
        "        if (from->shape[at] == 0) {\n            return false;",
        f"{NDARRAY} -k setitem",
    ),
    Fault(
        "csrc/python/indexing.c",
        "PyObject *to = stop < 0 ? Py_NewRef(Py_None) : PyLong_FromSsize_t(stop);",
        "PyObject *to = PyLong_FromSsize_t(stop);",
        f"{NDARRAY} -k process_slice",
    ),
    Fault(
        "csrc/python/math.c",
        "if (a->ndim < 2 || b->ndim < 2) {",
        "if (a->ndim < 2 || b->ndim < 1) {",
        f"{VALUES} -k matmul",
    ),
    Fault(
        "csrc/python/math.c",
        "*reduced *= gone[i] ? a->shape[i] : 1;",
        "*reduced *= gone[i] ? a->shape[0] : 1;",
        f"{VALUES} -k reductions",
    ),
    Fault(
        "csrc/python/module.c",
        ' && value[0] != 0 && strcmp(value, "0") != 0;',
        " && value[0] != 0;",
        "tests/csrc/test_bind.py -k trace",
    ),
    Fault(
        "csrc/python/ndarray.c",
        "a.dtype = dtype_object == Py_None ? h->dtype : a.dtype;",
        "a.dtype = dtype_object == Py_None ? ND_F32 : a.dtype;",
        f"{NDARRAY} {BOUNDS} -k 'make or strides'",
    ),
    Fault(
        "csrc/python/ndarray.c",
        "if (offset < 0 || offset > bytes / item) {",
        "if (offset > bytes / item) {",
        f"{NDARRAY} {BOUNDS} -k 'make or strides'",
    ),
    Fault(
        "csrc/python/object.c",
        "        PyObject_ClearWeakRefs(object);\n",
        "        self->weak_references = NULL;\n",
        f"{NDARRAY} -k constructor",
    ),
    Fault(
        "csrc/python/protocols.c",
        "        nd_count_write(state, &hold->array);\n    } else if (hold->hashed) {",
        "    } else if (hold->hashed) {",
        "tests/test_changed_data.py",
    ),
    Fault(
        "csrc/python/protocols.c",
        "if ((size_t)bytes.len != (size_t)nd_size(&host) * nd_dtype_size(dtype)) {",
        "if ((size_t)bytes.len < (size_t)nd_size(&host) * nd_dtype_size(dtype)) {",
        f"{VALUES} -k copies",
    ),
    Fault(
        "csrc/python/run.c",
        "    if (state->trace) {\n        char text[256];",
        "    if (state->sync) {\n        char text[256];",
        "tests/csrc/test_bind.py -k trace",
    ),
    Fault(
        "csrc/python/staging.c",
        "if (array.storage->bytes > (size_t)self->bytes) {",
        "if (array.storage->bytes / 2 > (size_t)self->bytes) {",
        "tests/data/test_prefetch.py -k staging",
    ),
    Fault(
        "csrc/python/streams.c",
        "    type->tp_free(object);\n    Py_DECREF(type);",
        "    type->tp_free(object);",
        LEAKS,
    ),
    Fault(
        "csrc/python/structured.c",
        "            s->copy_back = output;\n",
        "            s->copy_back = output && f->kind != KIND_IO;\n",
        "tests/csrc/test_bind.py -k in_place",
    ),
    Fault(
        "csrc/python/structured.c",
        "        if (overlaps || !has_layout",
        "        if (!has_layout",
        "tests/csrc/test_bind.py",
    ),
    Fault(
        "csrc/python/structured.c",
        "        } else if (c->no_batch) {\n            ndim = -1;\n        }",
        "        }",
        f"{BAD} {VALUES} -k 'sizes or matmul'",
    ),
    Fault(
        "csrc/python/values.c",
        "exponent == 0   ? ldexp(fraction, -24)",
        "exponent == 0   ? ldexp(fraction, -25)",
        f"{NDARRAY} -k float16",
    ),
    Fault(
        "csrc/python/values.c",
        "good = count == 2 && pairs[i][0] >= 0 && pairs[i][1] >= 0 &&",
        "good = count == 2 && pairs[i][0] >= 0 &&",
        f"{NDARRAY} -k pad",
    ),
    Fault(
        "csrc/python/views.c",
        '    if (count != a->ndim) {\n        return PyErr_Format(PyExc_ValueError, "permute',
        '    if (count > a->ndim) {\n        return PyErr_Format(PyExc_ValueError, "permute',
        f"{NDARRAY} -k view_errors",
    ),
    Fault(
        "csrc/python/views.c",
        "(view.shape[axes[i]] - 1) * stride",
        "view.shape[axes[i]] * stride",
        f"{NDARRAY} -k flip",
    ),
    # ---- the CPU backend ----
    Fault(
        "csrc/cpu/attention.h",
        "(p->groups == 1 ? 0 : head)",
        "(p->groups >= 1 ? 0 : head)",
        f"{OPS} -k 'test_structured and block_sparse'",
    ),
    Fault(
        "csrc/cpu/attention.h",
        "min_of(t + keys - queries - s, n)",
        "min_of(t - s, n)",
        f"{OPS} -k 'test_structured and attention_bwd'",
    ),
    Fault(
        "csrc/cpu/attention.h",
        "_mm512_set1_ps(of_j == NULL ? factor : of_j[j + l])",
        "_mm512_set1_ps(of_j == NULL ? factor : of_j[j])",
        f"{OPS} -k 'test_structured and attention_fwd'",
    ),
    Fault(
        "csrc/cpu/attention_bwd.c",
        "i < min_of(n, first + ROWS); i++",
        "i < min_of(n - 1, first + ROWS); i++",
        f"{OPS} -k 'test_structured and attention_bwd'",
    ),
    Fault(
        "csrc/cpu/attention_bwd.c",
        "int64_t first = n;",
        "int64_t first = 0;",
        "tests/ops/test_attention.py",
    ),
    Fault(
        "csrc/cpu/attention_bwd.c",
        "lse[i] != -INFINITY ? lse[i] : INFINITY;",
        "lse[i] != INFINITY ? lse[i] : INFINITY;",
        f"{OPS} -k 'test_structured and attention_bwd'",
    ),
    Fault(
        "csrc/cpu/attention_fwd.c",
        "top[i] = top[i] == -INFINITY ? 0.0f : top[i];",
        "top[i] += 0;",
        f"{OPS} -k minus_infinity",
    ),
    Fault(
        "csrc/cpu/attention_fwd.c",
        "out->lists[i] >= others",
        "out->lists[i] > others",
        f"{BAD} -k refused_values",
    ),
    Fault(
        "csrc/cpu/block_lists.c",
        "for (int64_t length = longest; length >= 0; length--) {",
        "for (int64_t length = 0; length <= longest; length++) {",
        f"{OPS} -k 'test_structured and block_lists'",
    ),
    Fault(
        "csrc/cpu/block_lists.c",
        "if (total != size) {",
        "if (total > size) {",
        f"{BAD} -k 'refused_values and block_lists'",
    ),
    Fault(
        "csrc/cpu/backend.c",
        "(double)(to->time.tv_nsec - from->time.tv_nsec) * 1e-6;",
        "(double)(to->time.tv_nsec - from->time.tv_nsec) * 1e-3;",
        "tests/csrc/test_device.py",
    ),
    Fault(
        "csrc/cpu/convert.c",
        "return x < -0x1p63f ? INT64_MIN : y;",
        "return y;",
        f"{NDARRAY} -k out_of_range",
    ),
    Fault(
        "csrc/cpu/copy.c",
        " && loop->strides[0][inner] == 1 && loop->strides[1][row] == 1;",
        " && loop->strides[0][inner] == 1;",
        f"{OPS} -k any_strides",
    ),
    Fault(
        "csrc/cpu/cross_entropy.c",
        "if (target >= j && target < j + columns) {",
        "if (target >= j && target + 1 < j + columns) {",
        f"{OPS} -k cross_entropy",
    ),
    Fault(
        "csrc/cpu/cross_entropy.c",
        "            write_gradient(logits, i, targets[i], lse[i], 1.0f, dlogits);",
        "            write_gradient(logits, i, targets[i], lse[0], 1.0f, dlogits);",
        f"{OPS} -k cross_entropy_fwd_bwd",
    ),
    Fault(
        "csrc/cpu/decode.c",
        "int64_t capacity = min_of(args->keys->shape[2], args->cos->shape[0]);",
        "int64_t capacity = args->keys->shape[2];",
        f"{BAD} -k refused_values",
    ),
    Fault(
        "csrc/cpu/dilated.c",
        "(t % max_of(segment, 1) - h) % max_of(dilation, 1) == 0;",
        "(t - h) % max_of(dilation, 1) == 0;",
        f"{OPS} -k 'test_structured and dilated_sum'",
    ),
    Fault(
        "csrc/cpu/dilated.c",
        "(weighted && top == -INFINITY)",
        "(weighted && sum < 0)",
        f"{OPS} -k 'test_structured and dilated_merge'",
    ),
    Fault(
        "csrc/cpu/elementwise.c",
        "*scalar = s->constant || stride == 0;",
        "*scalar = s->constant;",
        f"{OPS} -k 'broadcast_and_scalars'",
    ),
    Fault(
        "csrc/cpu/embedding.c",
        "cpu_at(args->w, ids[i] * stride)",
        "cpu_at(args->w, ids[i] * c)",
        f"{OPS} -k embedding_fwd",
    ),
    Fault(
        "csrc/formula.h",
        "(density > 0.0f ? x : 0.0f) * 0.398942280f",
        "x * 0.398942280f",
        f"{OPS} -k behind_a_product",
    ),
    Fault("csrc/formula.h", "a * s * (s * e)", "x * s * (s * e)", f"{OPS} -k behind_a_product"),
    Fault(
        "csrc/cpu/linear_gelu.c",
        "            if (args->tanh) {",
        "            if (!args->tanh) {",
        f"{OPS} -k linear_gelu_fwd",
    ),
    Fault(
        "csrc/cpu/linear_gelu.c",
        "to = row * args->y->strides[0] + column;",
        "to = row * args->y->shape[1] + column;",
        f"{OPS} -k linear_gelu_fwd",
    ),
    Fault(
        "csrc/cpu/linear_gelu.c",
        "int64_t from = row * args->slope->shape[1] + column;",
        "int64_t from = row * args->slope->shape[1] + column - j;",
        f"{OPS} -k linear_gelu_fwd",
    ),
    Fault(
        "csrc/cpu/linear_rotary.c",
        "args->parts, 1.0};",
        "args->parts, -1.0};",
        f"{OPS} -k 'test_structured and linear_rotary_fwd'",
    ),
    Fault(
        "csrc/cpu/linear_rotary.c",
        '    ND_TRY(cpu_check_turn("linear_rotary_fwd", args->y, args->parts, args->cos));\n',
        "",
        f"{BAD} -k linear_rotary_fwd",
    ),
    Fault(
        "csrc/cpu/matmul.c", "db2[c] += (float)sum;", "db2[c] = (float)sum;", f"{OPS} -k bias_bwd"
    ),
    Fault(
        "csrc/python/views.c",
        "nd_is_contiguous(b) &&",
        "true &&",
        "tests/csrc/test_ndarray.py -k join",
    ),
    Fault(
        "csrc/cpu/layernorm.c",
        "db[j] += (float)db_sum;",
        "db[j] = (float)db_sum;",
        f"{OPS} -k layernorm_bwd",
    ),
    Fault(
        "csrc/cpu/matmul.c",
        "        base = c;\n        base_row = ldc;",
        "        base_row = ldc;",
        f"{OPS} -k 'test_structured and matmul'",
    ),
    Fault(
        "csrc/cpu/matmul.c",
        "            base_row = 0;",
        "            base_row = 1;",
        f"{OPS} -k 'test_structured and linear_fwd'",
    ),
    Fault(
        "csrc/cpu/memory.c",
        "            trim_locked();\n            b = system_block",
        "            b = system_block",
        "tests/csrc/test_memory_failure.py",
    ),
    Fault(
        "csrc/cpu/memory.c",
        "max_of(pool.stats.peak_bytes, pool.stats.live_bytes)",
        "pool.stats.live_bytes",
        "tests/csrc/test_device.py",
    ),
    Fault(
        "csrc/cpu/optimizer.c",
        "isfinite(norm) ? scale : NAN;",
        "scale;",
        f"{OPS} -k 'broken_gradient'",
    ),
    Fault(
        "csrc/cpu/optimizer.c",
        "(float)(1.0 / sqrt(1.0 - pow(args->beta2, (double)args->step)))",
        "(float)(1.0 / (1.0 - pow(args->beta2, (double)args->step)))",
        f"{OPS} -k adamw",
    ),
    Fault(
        "csrc/cpu/matmul.c",
        "result[c] = row[c] * factor[c];",
        "result[c] = row[c];",
        f"{OPS} -k linear_gelu_bwd",
    ),
    Fault(
        "csrc/cpu/panels.c",
        "_mm512_maskz_loadu_ps(base ? masks[half] : 0, from)",
        "_mm512_maskz_loadu_ps(masks[half], from)",
        f"{OPS} -k over_nothing",
    ),
    Fault(
        "csrc/cpu/panels.c",
        "uint32_t *a_panel = panels + panel_words(f, i % group, ROWS, k);",
        "uint32_t *a_panel = panels;",
        "tests/csrc/test_panels.py",
    ),
    Fault(
        "csrc/cpu/panels.c",
        "load(FROM_BF16, first + step, 2 * w + 1 < k ? lanes : 0)",
        "load(FROM_BF16, first + step, lanes)",
        "tests/csrc/test_panels.py",
    ),
    Fault(
        "csrc/cpu/reduce.c",
        "for (int64_t piece = 1; piece < pieces; piece++) {",
        "for (int64_t piece = 2; piece < pieces; piece++) {",
        f"{OPS} -k test_reductions",
    ),
    Fault(
        "csrc/cpu/rotary.c",
        "if (slice % slices >= args->parts) {",
        "if (slice % slices > args->parts) {",
        f"{OPS} -k 'test_structured and rotary'",
    ),
    Fault(
        "csrc/cpu/sgemm.c",
        "beta == 0.0f ? 0.0f : beta * c[i * ldc + j];",
        "beta * c[i * ldc + j];",
        f"{OPS} -k over_nothing",
    ),
    Fault(
        "csrc/cpu/threads.c",
        "return forked ? 1 : wanted < most ? wanted : most;",
        "return wanted < most ? wanted : most;",
        "tests/csrc/test_threads.py -k forked_child",
    ),
    # ---- kernels of one's own ----
    Fault(
        "csrc/python/kernel.c",
        "if (memcmp(&self->admitted[i], out, sizeof *out) == 0) {",
        "if (memcmp(&self->admitted[i], out, sizeof *out) != 0) {",
        KERNELS,
    ),
    Fault(
        "csrc/python/kernel.c",
        "if (recorded != NULL && PySet_Add(recorded, self->module) < 0) {",
        "if (recorded != NULL && PySet_Size(recorded) < 0) {",
        KERNELS,
    ),
    Fault(
        "csrc/python/parameters.c",
        "if (p->dtype != ANY_DTYPE && (int)a->dtype != p->dtype) {",
        "if (p->dtype != ANY_DTYPE && (int)a->dtype > p->dtype) {",
        KERNELS,
    ),
]
