# Compile csrc/ and cuda/ into objects, and link needle's shared objects. setup.py writes what it
# chose into $(O)/core.mk and $(O)/cuda.mk and calls this file with O, the folder of the objects.
# An object is made again where its source, one of its headers (-MMD) or its settings have changed.
# Each output appears by a rename: a running process may have the old one mapped.

.DELETE_ON_ERROR:
.SUFFIXES:
include $(O)/core.mk
-include $(O)/cuda.mk

CPU := $(wildcard csrc/cpu/*.c)
SOURCES := $(wildcard csrc/*.c csrc/python/*.c) $(if $(LEVELS),,$(CPU))
OBJECTS := $(SOURCES:%.c=$(O)/%.o) $(LEVELS:%=$(O)/%/cpu.o)
CUDA_OBJECTS := $(patsubst %,$(O)/%.o,$(wildcard cuda/*.cu cuda/*.cpp))
comma := ,
table = cpu_backend_$(subst -,_,$(1))
compile = @mkdir -p $(@D) && echo "needle: $<" && \
    $(1) -MMD -MF $(@:.o=.d) -MT $@ -c $< -o $@.part.o && mv $@.part.o $@

core: $(CORE)
cuda: $(CUDA)

$(CORE): $(OBJECTS)
	@$(CC) -shared -fopenmp $^ $(BLAS_LINK) -lm $(LDFLAGS) -o $@.part && mv $@.part $@
	@echo "needle: linked $(@F)"

# status.c and array.c are in both shared objects: each has its own, nothing is exported.
$(CUDA): $(CUDA_OBJECTS) $(O)/csrc/status.o $(O)/csrc/array.o cuda/exports.map
	@$(CXX) -shared $(filter %.o,$^) -Wl,-z,defs -Wl,--version-script=cuda/exports.map \
	    $(CUDA_LINK) $(LDFLAGS) -o $@.part && mv $@.part $@
	@echo "needle: linked $(@F)"

$(O)/csrc/python/%.o: csrc/python/%.c $(O)/core.mk
	$(call compile,$(CC) $(FLAGS) $(PYTHON_FLAGS) $(FACTS))
# These alone, so that a new commit compiles two files again.
$(O)/csrc/python/module.o $(O)/csrc/python/backends.o: FACTS := -include $(O)/built.h
$(O)/csrc/%.o: csrc/%.c $(O)/core.mk
	$(call compile,$(CC) $(FLAGS))
$(O)/cuda/%.o: cuda/% $(O)/cuda.mk
	$(call compile,$(NVCC) $(CUDA_FLAGS))

# A portable build compiles csrc/cpu once a level, each into an object that shows its table alone.
define level
$(O)/$(1)/csrc/cpu/%.o: csrc/cpu/%.c $(O)/core.mk
	$$(call compile,$$(CC) $$(FLAGS) -march=$(1) -Dcpu_backend=$(call table,$(1)) \
	    -DNEEDLE_LEVEL='"$(1)$$(comma) "')
$(O)/$(1)/cpu.o: $(CPU:%.c=$(O)/$(1)/%.o)
	@$$(CC) -r -nostdlib $$^ -o $$@.part.o && \
	    $$(OBJCOPY) --keep-global-symbol=$(call table,$(1)) $$@.part.o && mv $$@.part.o $$@
endef
$(foreach name,$(LEVELS),$(eval $(call level,$(name))))

-include $(shell find $(O) -name '*.d' 2>/dev/null)
