/* callables.c - each op of ops.def as a function of the module: its arguments by position or name,
 * its signature and its summary come from the table. And the table itself, as data for tools.
 */
#include "arguments.h"
#include "ops.h"

/* The operands a caller passes: all but OUT. */
static int parameter_count(const nd_op_info *info) {
    switch (info->kind) {
    case OP_KIND_EW1:
        return 1;
    case OP_KIND_OP: {
        int count = 0;
        for (const field *f = info->fields; f->kind != KIND_END; f++) {
            count += f->kind != KIND_OUT;
        }
        return count;
    }
    default:
        return 2;
    }
}

static const char *parameter_name(const nd_op_info *info, int index) {
    if (info->kind != OP_KIND_OP) {
        bool reduction = info->kind == OP_KIND_RED || info->kind == OP_KIND_ARG;
        return index == 0 ? "x" : reduction ? "axes" : "y";
    }
    for (const field *f = info->fields;; f++) {
        if (f->kind != KIND_OUT && index-- == 0) {
            return f->name;
        }
    }
}

static int intern_names(nd_state *state) {
    for (int id = 0; id < NUM_OPS; id++) {
        int count = parameter_count(&nd_ops[id]);
        for (int i = 0; i < count; i++) {
            PyObject *name = PyUnicode_InternFromString(parameter_name(&nd_ops[id], i));
            if (name == NULL) {
                return -1;
            }
            state->field_names[id][i] = name;
        }
    }
    return 0;
}

/* Positional and keyword arguments into given[]. Names at a call site are interned, so that
 * comparing pointers nearly always finds them. */
static int parse(nd_state *state, nd_op id, PyObject *const *arguments, Py_ssize_t positional,
                 PyObject *keywords, PyObject **given) {
    const nd_op_info *info = &nd_ops[id];
    PyObject *const *names = state->field_names[id];
    int count = parameter_count(info);
    if (positional > count) {
        FAIL(PyExc_TypeError, "%s() takes %d arguments, but %zd were given", info->name, count,
             positional);
    }
    for (int i = 0; i < count; i++) {
        given[i] = i < positional ? arguments[i] : NULL;
    }
    Py_ssize_t named = keywords != NULL ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < named; k++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, k);
        int at = 0;
        while (at < count && names[at] != name) {
            at++;
        }
        for (int i = 0; at == count && i < count; i++) {
            if (PyUnicode_Compare(names[i], name) == 0) {
                at = i;
            }
        }
        if (at == count) {
            FAIL(PyExc_TypeError, "%s() has no argument %R", info->name, name);
        }
        if (given[at] != NULL) {
            FAIL(PyExc_TypeError, "%s() got %R twice", info->name, name);
        }
        given[at] = arguments[positional + k];
    }
    for (int i = 0; i < count; i++) {
        if (given[i] == NULL) {
            FAIL(PyExc_TypeError, "%s() lacks its argument %R", info->name, names[i]);
        }
    }
    return 0;
}

static PyObject *call_binary(nd_state *state, nd_op id, PyObject *const *given) {
    bool unsupported;
    PyObject *result = nd_binary(state, id, given[0], given[1], NULL, &unsupported);
    if (unsupported) {
        PyErr_Format(PyExc_TypeError,
                     "%s: takes an NDArray and an NDArray or a number, not %.80s "
                     "and %.80s",
                     nd_ops[id].name, Py_TYPE(given[0])->tp_name, Py_TYPE(given[1])->tp_name);
    }
    return result;
}

static PyObject *call_reduction(nd_state *state, nd_op id, PyObject *const *given) {
    static const field axes = {KIND_I64, "axes", "", CLASS_ANY};
    nd_slot slot;
    nd_array out;
    if (nd_check_operand(state, nd_ops[id].name, "x", given[0]) < 0 ||
        nd_take_number(nd_ops[id].name, &axes, given[1], &slot) < 0) {
        return NULL;
    }
    const nd_array *x = nd_array_of(given[0]);
    int count = slot.integer < 0 || slot.integer > x->ndim ? x->ndim + 1 : (int)slot.integer;
    return nd_reduce(state, id, x, count, &out) < 0 ? NULL : nd_wrap(state, &out);
}

static PyObject *call_op(PyObject *module, nd_op id, PyObject *const *arguments,
                         Py_ssize_t positional, PyObject *keywords) {
    nd_state *state = nd_module_state(module);
    PyObject *given[ND_MAX_FIELDS];
    if (parse(state, id, arguments, positional, keywords, given) < 0) {
        return NULL;
    }
    switch (nd_ops[id].kind) {
    case OP_KIND_EW1:
        return nd_unary(state, id, given[0]);
    case OP_KIND_EW2:
    case OP_KIND_CMP:
        return call_binary(state, id, given);
    case OP_KIND_RED:
    case OP_KIND_ARG:
        return call_reduction(state, id, given);
    case OP_KIND_OP:
        break;
    }
    return nd_structured(state, id, given);
}

#define EACH_OP(name)                                                                          \
    static PyObject *py_##name(PyObject *module, PyObject *const *arguments, Py_ssize_t count, \
                               PyObject *keywords) {                                           \
        return call_op(module, OP_##name, arguments, count, keywords);                         \
    }
#include "ops.def"

/* Signatures and summaries for help(): the table's own text. */
#define TEXT(field, axes) ", " #field
#define IN(field, axes, dtype) TEXT(field, axes)
#define IN_ANY(field, axes, dtype) TEXT(field, axes)
#define IN_ROWS(field, axes, dtype) TEXT(field, axes)
#define IN_MATRIX(field, axes, dtype) TEXT(field, axes)
#define OPT(field, axes, dtype) TEXT(field, axes)
#define IO(field, axes, dtype) TEXT(field, axes)
#define IO_ANY(field, axes, dtype) TEXT(field, axes)
#define IO_ROWS(field, axes, dtype) TEXT(field, axes)
#define IO_OPT(field, axes, dtype) TEXT(field, axes)
#define OUT(field, axes, dtype)
#define F64(field) TEXT(field, )
#define I64(field) TEXT(field, )
#define METHOD(name, signature, summary)                                           \
    {#name, (PyCFunction)(void (*)(void))py_##name, METH_FASTCALL | METH_KEYWORDS, \
     #name "($module" signature ")\n--\n\n" summary},
#define EW1(name, types, formula) METHOD(name, ", x", "Elementwise: " #formula)
#define EW2(name, types, formula) METHOD(name, ", x, y", "Elementwise, broadcasting: " #formula)
#define CMP(name, formula) METHOD(name, ", x, y", "Elementwise, broadcasting, to bool: " #formula)
#define RED(name, types, start, combine, map) \
    METHOD(name, ", x, axes", "Reduce the last `axes` axes of x: " #name)
#define ARG(name, better) \
    METHOD(name, ", x, axes", "Index (int64) of the " #name " over the last `axes` axes of x")
#define OP(name, operands) METHOD(name, operands, "Operation " #name " of csrc/ops.def")
static PyMethodDef methods[] = {
#include "ops.def"
    {NULL, NULL, 0, NULL},
};

/* ---- the table itself ------------------------------------------------------------------------ */
static const char *const kind_texts[] = {
    [OP_KIND_EW1] = "EW1", [OP_KIND_EW2] = "EW2", [OP_KIND_CMP] = "CMP",
    [OP_KIND_RED] = "RED", [OP_KIND_ARG] = "ARG", [OP_KIND_OP] = "OP",
};
static const char *const field_texts[] = {
    [KIND_IN] = "IN",   [KIND_IN_ANY] = "IN_ANY",       [KIND_IN_ROWS] = "IN_ROWS",
    [KIND_OPT] = "OPT", [KIND_IN_MATRIX] = "IN_MATRIX", [KIND_IO] = "IO",
    [KIND_OUT] = "OUT", [KIND_IO_ANY] = "IO_ANY",       [KIND_IO_ROWS] = "IO_ROWS",
    [KIND_F64] = "F64", [KIND_IO_OPT] = "IO_OPT",       [KIND_I64] = "I64",
};
static const char *const class_names[] = {
    [CLASS_F] = "F",   [CLASS_f4] = "f4", [CLASS_i4] = "i4",
    [CLASS_i8] = "i8", [CLASS_b1] = "b1", [CLASS_ANY] = "ANY",
};

/* What the entries that write no operands out have. */
static int implied_fields(const nd_op_info *info, field *out) {
    dtype_class class = info->types == TYPES_FLOAT ? CLASS_F : CLASS_ANY;
    int count = 0;
    out[count++] = (field){KIND_IN_ANY, "x", "*", class};
    if (info->kind == OP_KIND_EW2 || info->kind == OP_KIND_CMP) {
        out[count++] = (field){KIND_IN_ANY, "y", "*", class};
    } else if (info->kind != OP_KIND_EW1) {
        out[count++] = (field){KIND_I64, "axes", "", CLASS_ANY};
    }
    out[count++] = (field){KIND_OUT, "out", "*", class};
    return count;
}

/* (kind, ((how, name, axes, dtype), ...)) */
static PyObject *describe(const nd_op_info *info) {
    field implied[3];
    const field *fields = info->fields != NULL ? info->fields : implied;
    int count = info->fields != NULL ? 0 : implied_fields(info, implied);
    while (info->fields != NULL && fields[count].kind != KIND_END) {
        count++;
    }
    PyObject *operands = PyTuple_New(count);
    for (int i = 0; operands != NULL && i < count; i++) {
        const field *f = &fields[i];
        bool number = f->kind == KIND_F64 || f->kind == KIND_I64;
        PyObject *one = Py_BuildValue("(ssss)", field_texts[f->kind], f->name, f->axes,
                                      number ? "" : class_names[f->dtype]);
        if (one == NULL) {
            Py_CLEAR(operands);
        } else {
            PyTuple_SET_ITEM(operands, i, one);
        }
    }
    return operands == NULL ? NULL : Py_BuildValue("(sN)", kind_texts[info->kind], operands);
}

static PyObject *module_table(PyObject *module, PyObject *unused) {
    PyObject *table = PyDict_New();
    for (int id = 0; table != NULL && id < NUM_OPS; id++) {
        PyObject *entry = describe(&nd_ops[id]);
        if (entry == NULL || PyDict_SetItemString(table, nd_ops[id].name, entry) < 0) {
            Py_CLEAR(table);
        }
        Py_XDECREF(entry);
    }
    return table;
}

static PyMethodDef table_method[] = {
    {"table", module_table, METH_NOARGS,
     "table($module)\n--\n\ncsrc/ops.def as a dict: op -> (kind, operands), an operand being (how "
     "it "
     "is used, name, axes, dtype)."},
    {NULL, NULL, 0, NULL},
};

int nd_callables_init(PyObject *module, nd_state *state) {
    bool failed = intern_names(state) < 0 || PyModule_AddFunctions(module, methods) < 0;
    return failed ? -1 : PyModule_AddFunctions(module, table_method);
}
