# Compile csrc/ and cuda/ into objects in O, and link needle's shared objects, the goals, into OUT.
# setup.py writes what it chose into $(O)/core.mk and $(O)/cuda.mk. An object is made again where its
# source, one of its headers (-MMD; -MP: also one that is gone) or these choices have changed. Each
# output appears by a rename, and those in OUT once all goals are linked: an interrupted build leaves
# the old ones, and a running process may have them mapped.

.DELETE_ON_ERROR:
.SUFFIXES:
include $(O)/core.mk
-include $(O)/cuda.mk

# gnu17 rather than c17: POSIX names, and a*b+c may become an FMA. errno and floating-point traps are
# never looked at here, and stop vectorisation. Integers wrap around, as NumPy's do: what int64 arrays
# hold may overflow, and so may the strides of an array without elements.
FLAGS := -std=gnu17 $(if $(DEBUG),-O1 -g -DNEEDLE_DEBUG,-O3 -g1) -fPIC -fvisibility=hidden -fopenmp \
    -fwrapv -fno-math-errno -fno-trapping-math -Wall -Wextra $(WERROR) $(MARCH) $(CFLAGS) -Icsrc $(BLAS_FLAGS)
comma := ,
CUDA_FLAGS := -std=c++17 -O3 -lineinfo -Icsrc -Icuda $(CUDA_INCLUDE) $(GENCODE) -Wno-deprecated-gpu-targets \
    -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wextra$(if $(WERROR),$(comma)-Werror -Werror all-warnings) \
    $(if $(DEBUG),-DNEEDLE_DEBUG) $(if $(findstring sm_90a,$(GENCODE)),-DNEEDLE_HOPPER) $(NVCC_FLAGS)
# A portable build compiles csrc/cpu once a level, each into an object that shows its table alone, and
# csrc/python/backends.c chooses among the tables, the best first.
LEVELS := $(if $(PORTABLE),$(if $(filter x86_64%,$(shell $(CC) -dumpmachine)),x86-64-v4 x86-64-v3))
table = cpu_backend_$(subst -,_,$(1))

CPU := $(wildcard csrc/cpu/*.c)
SOURCES := $(wildcard csrc/*.c csrc/python/*.c) $(if $(LEVELS),,$(CPU))
OBJECTS := $(SOURCES:%.c=$(O)/%.o) $(LEVELS:%=$(O)/%/cpu.o)
CUDA_OBJECTS := $(patsubst %,$(O)/%.o,$(wildcard cuda/*.cu cuda/*.cpp))
OBJECT_GOALS := $(filter %.so,$(MAKECMDGOALS))
LINKED := $(addprefix $(O)/,$(notdir $(OBJECT_GOALS)))  # _C, and where it is wanted _cuda
compile = @mkdir -p $(@D) && echo "needle: $<" && \
    $(1) -MMD -MP -MF $(@:.o=.d) -MT $@ -c $< -o $@.part.o && mv $@.part.o $@

$(OUT)/%.so: $(O)/%.so | $(LINKED)
	@mkdir -p $(@D) && cp $< $@.part && mv $@.part $@
$(firstword $(LINKED)): $(OBJECTS)
	@$(CC) -shared -fopenmp $^ $(BLAS_LINK) -lm $(LDFLAGS) -o $@.part && mv $@.part $@
	@echo "needle: linked $(@F)"
# status.c and array.c are in both shared objects: each has its own, nothing is exported.
$(O)/_cuda.so: $(CUDA_OBJECTS) $(O)/csrc/status.o $(O)/csrc/array.o cuda/exports.map
	@$(CXX) -shared $(filter %.o,$^) -Wl,-z,defs -Wl,--version-script=cuda/exports.map \
	    $(CUDA_LINK) $(LDFLAGS) -o $@.part && mv $@.part $@
	@echo "needle: linked $(@F)"

# The stubs of the package, which it writes itself; _C.pyi is the last. OpenBLAS need not lie yet where
# the core will look for it.
$(OUT)/_C.pyi: $(OBJECT_GOALS) building/stubs.py $(wildcard $(OUT)/autograd/operators.py $(OUT)/ops/*.py)
	@LD_LIBRARY_PATH=$(patsubst -L%,%,$(filter -L%,$(BLAS_LINK))) PYTHONPATH=$(OUT)/..$${PYTHONPATH:+:$$PYTHONPATH} \
	    $(PYTHON) building/stubs.py $(OUT)

$(O)/csrc/python/%.o: csrc/python/%.c $(O)/core.mk
	$(call compile,$(CC) $(FLAGS) $(PYTHON_FLAGS) $(FACTS))
# These alone, so that a new commit compiles two files again.
$(O)/csrc/python/module.o $(O)/csrc/python/backends.o: FACTS := -include $(O)/built.h $(if $(LEVELS), \
    -D'NEEDLE_LEVELS(X)=$(foreach level,$(LEVELS),X("$(level)"$(comma) $(call table,$(level))))' \
    -Dcpu_backend=$(call table,$(lastword $(LEVELS))))
$(O)/csrc/%.o: csrc/%.c $(O)/core.mk
	$(call compile,$(CC) $(FLAGS))
$(O)/cuda/%.o: cuda/% $(O)/cuda.mk
	$(call compile,$(NVCC) $(CUDA_FLAGS))

define level
$(O)/$(1)/csrc/cpu/%.o: csrc/cpu/%.c $(O)/core.mk
	$$(call compile,$$(CC) $$(FLAGS) -march=$(1) -Dcpu_backend=$(call table,$(1)) \
	    -DNEEDLE_LEVEL='"$(1)$$(comma) "')
$(O)/$(1)/cpu.o: $(CPU:%.c=$(O)/$(1)/%.o)
	@$$(CC) -r -nostdlib $$^ -o $$@.part.o && $$(shell $$(CC) -print-prog-name=objcopy) \
	    --keep-global-symbol=$(call table,$(1)) $$@.part.o && mv $$@.part.o $$@
endef
$(foreach name,$(LEVELS),$(eval $(call level,$(name))))

-include $(shell find $(O) -name '*.d' 2>/dev/null)
