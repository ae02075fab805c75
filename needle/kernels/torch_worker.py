"""A process for one of the two sources of a KernelBench problem: `torch_worker.py FD PARENT`.

It imports torch, says so, and does what the pool asks for: "load" a source and "make" its model; as
the reference "draw" inputs, "compare" a candidate's outputs with its own, and tell the "rates" of
the device; as the candidate "run". Tensors travel as raw bytes beside their dtypes and shapes.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":  # this folder's modules are none of Python's, and needle is beside it
    sys.path[:] = [str(HERE.parents[1]), *(p for p in sys.path if p != str(HERE))]

import ast
import importlib.util
import time
import traceback
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from needle.kernels.process import MESSAGE_LETTERS, Message, answer_all, failure
from needle.kernels.timing import FLUSH_BYTES

HOST_MILLISECONDS = 0.05  # in which the host sees an idle device and records an event
CLASSES = {"reference": "Model", "candidate": "ModelNew"}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 1e-2}  # absolute and relative: KernelBench's
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


# ---- values --------------------------------------------------------------------------------------


def listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values]


def pack(values: Any) -> list[Any]:
    """Return what a model takes or gives, as it is sent: numbers, texts, and tensors as bytes."""
    found: list[Any] = []
    for value in listed(values):
        if isinstance(value, (bool, int, float, str, type(None))):
            found.append(value)
            continue
        if type(value) not in (torch.Tensor, torch.nn.Parameter):  # a subclass may compute later
            raise TypeError(f"{type(value).__name__}: models take and give tensors and numbers")
        flat = value.detach().contiguous().reshape(-1).cpu()
        data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        found.append({"dtype": str(value.dtype)[6:], "size": list(value.shape), "data": data})
    return found


def unpack(sent: list[Any]) -> list[Any]:
    """Return the values, tensors on the device."""
    found: list[Any] = []
    for one in sent:
        if isinstance(one, dict):
            data, dtype = bytearray(one["data"]), getattr(torch, one["dtype"])
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            one = flat.reshape(one["size"]).to(DEVICE)
        found.append(one)
    return found


# ---- the steps -----------------------------------------------------------------------------------


class Side:
    """A source with its model. Each step returns a message. Attributes: inputs (of the last
    call), facts (of the device)."""

    def __init__(self) -> None:
        name = torch.cuda.get_device_name(0) if CUDA else "CPU"
        self.facts = {"hardware": name, "device": str(DEVICE)}
        self.flush = torch.empty(FLUSH_BYTES if CUDA else 1 << 20, dtype=torch.uint8, device=DEVICE)
        self.inputs: list[Any] = []

    def time(self, call: Any) -> tuple[float, Any]:
        """Return (milliseconds, what the call returns), by events after writing a buffer larger
        than any L2 cache. Work on other streams, which the events do not see, keeps the device busy
        after them: it counts."""
        self.flush.fill_(1)
        if not CUDA:
            began = time.perf_counter()
            result = call()
            return (time.perf_counter() - began) * 1e3, result
        begin, end, idle = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        result = call()
        end.record()
        torch.cuda.synchronize()
        idle.record()
        torch.cuda.synchronize()
        after = end.elapsed_time(idle)
        return begin.elapsed_time(end) + (after if after > HOST_MILLISECONDS else 0.0), result

    def load(self, job: Message) -> Message:
        """Import the source as a module, from a file, which Triton needs."""
        name, path = job["role"], Path.cwd() / f"{job['role']}.py"
        path.write_text(job["source"])
        spec = importlib.util.spec_from_file_location(name, path)
        self.module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.cls = getattr(self.module, CLASSES[name])
        return {}

    def make(self, job: Message) -> Message:
        """Make the model, whose weights follow from the seed."""
        self.dtype, self.tolerance = DTYPES[job["precision"]], TOLERANCES[job["precision"]]
        torch.manual_seed(job["seed"])
        init = ast.literal_eval(job["init"]) if "init" in job else self.module.get_init_inputs()
        torch.manual_seed(job["seed"])
        self.model = self.cls(*init).to(DEVICE, self.dtype)
        ast.literal_eval(repr(init))  # ValueError: what cannot travel
        return {"init": repr(init)}

    def call(self, inputs: list[Any]) -> tuple[float, Any]:
        """Call the model on new inputs, warmed up with those before. Return (milliseconds,
        outputs)."""
        if self.inputs:
            self.model(*self.inputs)
        self.inputs = inputs
        return self.time(lambda: self.model(*inputs))

    # ---- of the reference ------------------------------------------------------------------------

    def draw(self, job: Message) -> Message:
        """Draw inputs, keep the right outputs, and return the inputs."""
        torch.manual_seed(job["seed"])
        drawn = self.module.get_inputs()
        floats = [torch.is_tensor(value) and value.is_floating_point() for value in drawn]
        values = pack(
            [value.to(self.dtype) if is_float else value for value, is_float in zip(drawn, floats)]
        )
        if job["twice"]:  # a state that the models keep, as an RNN may, then advances alike
            pack(self.model(*unpack(values)))  # TypeError: outputs that cannot be compared
        took, right = self.call(unpack(values))
        self.right = listed(right)
        return {"values": values, "time": took}

    def compare(self, job: Message) -> Message:
        """Compare the outputs of a candidate with the right ones."""
        got = unpack(job["values"])
        if len(got) != len(self.right):
            return {"issue": f"Expected {len(self.right)} outputs, got {len(got)}"}
        for new, old in zip(got, self.right):
            if not torch.is_tensor(old) or not torch.is_tensor(new):
                if new != old:
                    return {"issue": f"Output mismatch: Expected {old!r:.99}, got {new!r:.99}"}
                continue
            for what in ("shape", "dtype"):
                expected, found = getattr(old, what), getattr(new, what)
                if expected != found:
                    said = f"Output {what} mismatch: Expected {expected}, got {found}"
                    return {"issue": said}
            if not torch.allclose(new, old, self.tolerance, self.tolerance, equal_nan=True):
                apart = (new.double() - old.double()).abs()
                most, mean = apart.max().item(), apart.mean().item()
                both = {"max_difference": most, "avg_difference": mean}
                return {"issue": "Output mismatch", **both}
        return {"issue": ""}

    def rates(self, job: Message) -> Message:
        """Return the bytes of the outputs and the operations of the reference, and the rates of the
        device a second: of filling memory, and of a large product."""
        with FlopCounterMode(display=False) as counter:
            self.model(*self.inputs)
        fill = min(self.time(lambda: self.flush.fill_(2))[0] for _ in range(3))
        size, dtype = (4096, torch.bfloat16) if CUDA else (512, torch.float32)
        a = torch.ones(size, size, dtype=dtype, device=DEVICE)
        product = min(self.time(lambda: a @ a)[0] for _ in range(4))
        return {
            "written": sum(len(one["data"]) for one in pack(self.right) if isinstance(one, dict)),
            "operations": counter.get_total_flops(),
            "fill_rate": self.flush.numel() / (fill * 1e-3),
            "product_rate": 2 * size**3 / (product * 1e-3),
        }

    # ---- of the candidate ------------------------------------------------------------------------

    def run(self, job: Message) -> Message:
        """Call the model, and return its outputs; then overwrite their memory, where it might find
        them again. `twice`: call it with the same inputs before, and compare the bits."""
        answer: Message = {}
        if job["twice"]:
            first = self.model(*unpack(job["values"]))
            before = pack(first)
            self.overwrite(first)
        answer["time"], outputs = self.call(unpack(job["values"]))
        answer["values"] = pack(outputs)
        self.overwrite(outputs)
        if job["twice"]:
            answer["deterministic"] = before == answer["values"]
        return answer

    def overwrite(self, outputs: Any) -> None:
        """Fill the memory of outputs with bytes of 0xFF: NaN, or -1."""
        kept = [*self.model.parameters(), *self.model.buffers()]
        kept += filter(torch.is_tensor, self.inputs)
        places = {tensor.untyped_storage().data_ptr() for tensor in kept}
        for output in filter(torch.is_tensor, listed(outputs)):
            if output.untyped_storage().data_ptr() not in places:
                output.untyped_storage().fill_(0xFF)

    def do(self, job: Message) -> Message:
        try:
            with torch.no_grad():
                return {"status": "ok", **getattr(self, job["do"])(job)}
        except Exception as error:
            name = f"{type(error).__module__}.{type(error).__name__}"
            trace = traceback.format_exc()[-MESSAGE_LETTERS:]
            return {**failure("failed", error), "name": name, "traceback": trace}


if __name__ == "__main__":
    answer_all(sys.argv[1:], Side)
