"""The grammar of the fuzz's lines: a rule is a name and, below it, what it may be.

What it may be stands one a line, or between bars. <rule> stands for what the rule, or the method
of Lines of that name, draws; <x=rule> draws it once for the line, in which <x> then is the same
text, and <new> is the name of a new variable. A first word *N counts N times. A rule in CAPITALS
is a kind of line, drawn as often as the number behind it says.
"""

RULES = r"""
number
  *6 <plain> | *4 <speaker>(<reply><then>)
plain
  *2 0 | *2 1 | *2 -1 | 2 | 3 | 7 | -0.0 | 0.5 | 1e300 | -1e-45 | float('nan') | float('inf')
  -float('inf') | True | False | 2**31 | -2**31-1 | 2**53+1 | 2**63-1 | 2**63 | -2**63 | 2**64
  10**400 | -10**400 | np.float32(1.5) | np.float16(-0.0) | np.longdouble(3) | np.int8(-3)
  np.uint64(2**64-1) | np.int64(-2**63) | np.bool_(True) | np.float64('nan')
  np.datetime64(3, 's') | np.timedelta64(3, 's') | np.str_('3') | 1j | Fraction(1, 3)
  Decimal('1.5') | None
speaker
  Index | Float | Number | OwnInt | OwnFloat | Item
reply
  1.5 | 2 | Raised | 'text' | 1e300 | 1.0, Raised | 3, 2**70 | float('nan') | None
  2.0, float('inf') | True, Raised
integer
  *13 <small> | *3 <plain> | *4 <indexer>(<indices><then>)
small
  0 | 1 | 2 | 3 | 4 | 5 | 6 | 8 | -1 | -2
indexer
  Index | Number | OwnInt | Item
indices
  2 | 1 | 3, -1 | 0 | Raised | 2**63 | 1.5 | None, 2 | True
then
  *5 NOTHING | *5 , then=lambda: (<action>)
action
  gc.collect(0) | gc.collect() | drop('<variable>') | drop('<variable>'), gc.collect(0)
  drop('<variable>'), made((5,)), gc.collect(0) | Index(Raised).answer() | _C.cpu().empty_cache()
  aside(lambda: _C.cpu().empty_cache()) | <x=variable> + <x> | <variable>.fill(2)
  <variable>.__init__([1.0, 2.0])
  <variable>.__init__(np.ones((2,) * <small>)) | aside(lambda: <variable>.copy())
  _C.cuda_reset() | first(<variable>)
dtype
  *12 <good_dtype> | np.float32 | np.dtype('int64') | bool | np.uint8 | np.bool_ | <wrong_dtype>
  <wrong_dtype>
good_dtype
  'float32' | 'bfloat16' | 'float16' | 'int32' | 'int64' | 'uint8' | 'bool' | 'uint16'
wrong_dtype
  'float64' | 'f4' | '' | '\ud800' | None | 3 | object | np.complex64 | np.dtype('>f4')
  np.dtype([('a', 'f4')]) | OwnStr('x') | OwnStr(Raised) | Named('int32') | Named(3)
  Named(Raised) | b'int32' | Missing(3) | Missing('uint8') | [] | np.void | ...
device
  *2 None | *2 _C.cpu() | _C.cuda() | _C.cpu(1) | <thing>
array
  *6 <variable> | *2 <view> | *2 <made>
view
  <x=variable>[::-1] | <x=variable>[1:] | <x=variable>[:-1] | <x=variable>[..., ::2]
  <x=variable>[..., 1:] | <x=variable>[..., None] | <x=variable>[None] | <x=variable>[0]
  <x=variable>[:0] | <x=variable>.flip() | <x=variable>.reshape(-1)
  <x=variable>.permute(tuple(range(<x>.ndim))[::-1])
made
  *30 <laid_out> | *2 <subclass>(<laid_out>) | *2 unmade(<subclass>)
  dying(<laid_out>, lambda: (<action>)) | *2 <empty_view>
subclass
  *2 _C.NDArray | Sub | Slim | Loud | Dying
numpy
  *8 <wild>
  around(<wild>, lambda made, of: (<action>))
  around(<wild>, lambda made, of: setattr(made, 'shape', <new_shape>))
  around(<wild>, lambda made, of: setattr(of, 'shape', <new_shape>))
  np.array([<number>, <thing>, 2], object) | np.array(1.5) | np.zeros(3, [('a', 'f4')])
  np.zeros((1,) * 12)
new_shape
  (1,) * 12 | -1 | (2, -1) | ()
thing
  *8 <plain_thing> | *3 <number> | <numpy> | <array> | <changing> | [<number>, <number>]
  *2 <answering>(<answer><then>) | <talking>(<word><then>)
  Sequence(<integer>, <number>, <number><then>)
plain_thing
  None | ... | 'text' | '\ud800' | '' | b'bytes' | bytearray(b'12345678') | [] | () | Words()
  Words(a=1) | {1, 2} | [[]] | [[], [1]] | nested(9) | nested(8) | nested(70) | selfish()
  selfish(tuple) | (i for i in (1, 2)) | range(5) | iter([1, 2]) | object() | int | float | type
  np | _C | _C.NDArray | _C.CudaError | np.dtype('>f4') | _C.cpu() | _C.cuda() | _C.cuda(63)
  print | slice(None) | memoryview(b'abcd') | memoryview(b'') | (ctypes.c_float * 4)()
  [1, [2, 3]] | [True, 2**63] | ['1', 2]
  NotImplemented | Raised | iter(made((2, 3))) | made((3,)).__dlpack__() | _C.Event()
  made((2, 3))._handle | made((3, 4)).permute((1, 0)).flat | _C.Staging(64)
answering
  Array | Interface | Struct | Producer | Callable | Item | Iterable
answer
  np.ones(3) | None | Raised | 3 | np.ones(2), Raised | iter([1, 2]) | [1, 2] | made((3,))
  made((3,)).__dlpack__() | np.ones(3).__array_interface__
talking
  Truth | Path | Named | Missing | Equal | Reflected | OwnList | OwnTuple | OwnStr
word
  True | Raised | 3 | None | NotImplemented | [1, 2]
values
  *3 <numpy> | <array> | *2 <changing> | [<number>, <number>, <number>] | <number> | <thing>
key
  *3 <part> | *2 (<part>, <part>) | (<part>, <part>, <part>)
  (<part>, <part>, <part>, <part>, <part>, <part>, <part>, <part>, <part>)
part
  *4 <integer> | *4 slice(<end>, <end>, <end>) | None | ... | <thing>
end
  *2 None | <integer>
operand
  *6 <array> | *2 (<number>) | <numpy> | <thing>
axes
  None | 0 | -1 | 1 | (0, 1) | <integers> | <integer>
CONSTRUCTION 12
  <new> = _C.array(<values>, <dtype>)
  <new> = _C.array(<values>, <dtype>, <device>)
  <new> = _C.array(<values>, dtype=<dtype>, device=<device>) | <new> = _C.array(<values>)
  <new> = _C.array(<changing>, 'int32')
  <new> = _C.empty(<integers>, <dtype>, <device>)
  <new> = _C.empty(shape=<integers>, dtype=<dtype>)
  <new> = <subclass>(<values>, <device>, <dtype>)
  <new> = <subclass>(<values>, dtype=<dtype>)
  <new> = _C.NDArray.make(<integers>, <integers>, None, <array>._handle, <integer>)
  <new> = _C.NDArray.make(<integers>, handle=<array>._handle, offset=<integer>, dtype=<dtype>)
  <new> = _C.NDArray.make(<integers>, None, <device>, None, <integer>, <dtype>)
  *2 <new> = _C.from_dlpack(<producer>)
  <new> = <variable>.__init__(<values>, dtype=<dtype>)
  <new> = _C.NDArray.__new__(<subclass>, <thing>) | _C.NDArray.__new__(int, <thing>)
producer
  <numpy> | <thing>
  <array>.__dlpack__(max_version=(1, 0))
  <array>.__dlpack__(max_version=(0, 9))
  Producer(made((3,)).__dlpack__()<then>) | Producer(TypeError<then>) | Producer(3<then>)
  *3 capsule(<lent>, version=<version><more_lent>)
lent
  (2, 3) | (4,), (-1,), start=12 | (3, 2), (1, 3) | (0,), (5,) | (), (), start=4 | (2, 2), (0, 0)
  (1,) * 8, (2**60,) * 8 | (5, 1), (2, 9), start=8 | (0, 3), (2**59, 1) | (2,), (1,), start=4088
  (4,), None, (1, 8, 1) | (4,), None, (6, 8, 1) | (4,), None, (2, 16, 1)
  (0,), None, byte_offset=2**63
version
  None | (1, 0) | (1, 5)
more_lent
  *2 NOTHING | , deletes=False | , flags=1 | , flags=2
OPERATOR 8
  *6 <new> = <array> <operator> <operand>
  *2 <new> = <operand> <operator> <array> | <new> = -<array> | <new> = +<array>
  <new> = abs(<array>)
  <new> = pow(<array>, <operand>, <operand>) | <new> = <array>.maximum(<operand>)
  <new> = <array>.minimum(<operand>) | <new> = <array> @ <array>
operator
  + | - | * | / | ** | == | != | < | <= | > | >=
IN_PLACE 4
  *3 operator.<in_place>(<variable>, <operand>)
  operator.<in_place>(<x=variable>, <x>)
  operator.<in_place>(<x=variable>, <x>[::-1])
  operator.<in_place>(<x=variable>, <x>.flip())
  operator.<in_place>(<x=variable>, <x>[:1])
in_place
  iadd | isub | imul | itruediv | ipow
ELEMENTWISE 6
  *2 <new> = _C.<unary>(<array>) | <new> = _C.<unary>(x=<operand>)
  *5 <new> = _C.<binary>(<array>, <operand>)
  *2 <new> = _C.<binary>(<operand>, <array>)
  <new> = _C.<binary>(x=<array>, y=<operand>)
REDUCTION 5
  *3 <new> = _C.<reduction>(<array>, <integer>)
  *2 <new> = <array>.<reducing>(<axes>)
  <new> = <array>.<reducing>(<axes>, True)
  <new> = <array>.<reducing>(axis=<axes>, keepdims=<thing>)
reducing
  sum | mean | max | min | argmax | argmin
METHOD 12
  <new> = <array>.astype(<dtype>) | <new> = <array>.view(<dtype>) | <new> = <array>.to(<device>)
  <new> = <array>.reshape(<integers>)
  <new> = <array>.reshape(<integer>, -1) | <new> = <array>.permute(<integers>)
  <new> = <array>.permute(<integer>, <integer>)
  <new> = <array>.broadcast_to(<integers>)
  <new> = <x=variable>.broadcast_to((<small>,) + <x>.shape)
  <new> = <array>.as_strided(<integers>, <integers>)
  <new> = <x=variable>.as_strided((<x>.size + <small>,), (<small>,))
  <new> = <x=variable>.as_strided((<small>, <small>), (<small>, <small>))
  <new> = <array>.flip(<axes>)
  <new> = <array>.flip(<integer>, <integer>) | <new> = <x=variable>.pad(<pads>)
  <new> = <array>.<plain_method>() | <new> = <array>.<plain_method>()
  <new> = <array>.<plain_method>()
  <new> = <array>.process_slice(slice(<integer>, <integer>, <integer>), <integer>)
  <new> = <array>.__deepcopy__(<thing>) | <new> = <array>.__array__(<thing>)
  <new> = <array>.__array__(copy=False)
  <new> = <array>.__array__(np.float32, copy=False)
  <new> = <array>.__array__(<dtype>, copy=<thing>)
  <new> = <array>.__reduce_ex__(<integer>)
  <new> = <array>.__dlpack__(max_version=<integers>, copy=True)
  <new> = <array>.__dlpack__(stream=<thing>, dl_device=(1, 0))
  <new> = <array>.__dlpack__(dl_device=<thing>)
  <new> = _C.from_dlpack(<array>.__dlpack__(max_version=(1, 0), copy=True))
pads
  [(1, 2)] * <x>.ndim | [(0, <small>)] * <x>.ndim
  changing([(0, 1)] * <x>.ndim, <small>, 'clear')
  changing([(0, 1)] * <x>.ndim, <small>, 'grow') | [<integers>] * <x>.ndim
  [(Index(1<then>), 0)] * <x>.ndim | <integers>
plain_method
  copy | compact | exp | log | tanh | sqrt | item | tolist | numpy | is_compact | __copy__
  __reduce__ | __dlpack__ | __dlpack_device__ | __len__ | __repr__ | __str__ | __bool__ | __int__
  __float__ | __iter__ | __hash__ | __sizeof__
ASSIGNMENT 9
  *4 <variable>[<key>] = <values> | *2 <x=variable>[<key>] = <x> | <x=variable>[<key>] = <x>[::-1]
  <x=variable>[1:] = <x>[:-1] | <x=variable>[...] = <x>.flip() | <variable>.fill(<number>)
  <variable>.flat[<key>] = <values> | <variable>.fill(<own>) | _C.fill(<variable>, <own>)
  <variable>[0] = <own> | operator.iadd(<variable>, <own>) | <variable>.maximum(<own>)
  del <variable>[<key>] | _C.fill(<variable>, <number>) | _C.assign(<variable>, <array>)
  _C.assign(<x=variable>, <x>[::-1])
own
  OwnInt64(1.5, Raised) | OwnInt64(1.5, 3) | OwnInt64(3<then>) | OwnFloat32(1.5<then>)
  OwnFloat32(Raised<then>) | OwnFloat32(1.5, Raised)
  OwnFloat32(1.5, 1e300)
INDEX 7
  *3 <new> = <array>[<key>] | <new> = <array>.flat[<key>]
ATTRIBUTE 3
  *2 <variable>.<attribute> | *2 <variable>.<attribute> = <thing> | del <variable>.<attribute>
  <x=variable>.colour = 1; del <x>.colour
  _C.NDArray.colour = 1; del _C.NDArray.colour | <variable>.__class__ = <subclass>
  <variable>.__class__ = int | <variable>.flat.shape | <variable>.flat.device
  <variable>.flat.numpy() | vars(<variable>) | dir(<variable>)
BUFFER 5
  <new> = memoryview(<array>); <new>.tolist(); <new>[:1]
  <new> = memoryview(<x=variable>); drop('<x>'); bytes(<new>)
  <new> = memoryview(<array>); <new>.release()
  <new> = memoryview(<array>).cast('B'); <new>[:1] = b'3'
  <new> = np.asarray(<array>); <new> += 1
  <new> = np.array(<array>, copy=False)
  <new> = np.from_dlpack(<array>); <new>[...] = 3 | <new> = np.asarray(<array>.flat)
  io.BytesIO(bytes(64)).readinto(<array>) | bytearray(<array>) | bytes(<array>) | b'' + <array>
  np.frombuffer(<array>, 'u1')[:3]
  <new> = <x=variable>.__array_interface__; np.asarray(<x>) | <array>.__cuda_array_interface__
  (ctypes.c_char * 4).from_buffer(<array>)
  <new> = _C.array(memoryview(<array>), <dtype>)
  _C.from_dlpack(<array>)[...] = <number>
STREAMS 5
  <new> = _C.Download(<array>); <new>.wait(); <new>.wait()
  <new> = _C.Download(<x=variable>); drop('<x>'); <new>.wait()[...] = 3
  <new> = _C.Download(made((70, 80))); together(<new>.wait, <new>.wait, <new>.wait, times=1)
  _C.Download(<thing>)
  <new> = _C.Staging(<integer>, <device>)
  <new> = _C.Staging(64); np.frombuffer(<new>, 'f4')[:] = 2; <new>.send(<integers>, <dtype>)
  <new> = memoryview(_C.Staging(16)); <new>[:3] = b'abc'; bytes(<new>)
  <new> = _C.Staging(32); <new>.wait(); <new>.send((9,), 'float32')
  <new> = _C.Event(<device>); <new>.record(); (<new>.done(), <new>.elapsed(<thing>))
  <new> = _C.Event(); <new>.elapsed(<new>); _C.Event().elapsed(<new>)
  _C.Graph(<device>, lambda: 3) | _C.Graph(<device>, <thing>)
  <new> = _C.<streamed>; <new>.__new__(<new>, <thing>)
  <new> = _C.Event(); <new>.__init__(<thing>); copy.copy(<new>)
  <new> = <device>; (<new>.enabled(), <new>.reason(), <new>.synchronize())
  <new> = <device>; (<new>.properties(), <new>.memory_stats(), <new>.reset_peak())
  <new> = _C.cpu(<integer>); (<new> == <thing>, hash(<new>), repr(<new>), <new>.is_host)
  <new> = _C.cuda(index=<integer>); (<new>.records_graphs, <new>.empty_cache())
  round_trip(<device>, <small>)
streamed
  Event | Download | Staging | Graph
COPYING 3
  <new> = round_trip(<copied>, <small>) | <new> = copy.copy(<copied>)
  <new> = copy.deepcopy(<copied>)
  <new> = copy.deepcopy([<x=variable>, <x>]) | <new> = <array>.__reduce__()
  <new> = pickle.dumps(<copied>, 5)
copied
  *3 <array> | <array>.flat | <array>._handle | _C.Event() | <thing>
LIFETIME 4
  <new> = weak(<x=variable>, lambda: (<action>)); drop('<x>')
  <new> = weakref.proxy(<x=variable>); <new> + 1; drop('<x>')
  <new> = dying(made((3,)), lambda: (<action>)); drop('<new>'); gc.collect()
  *2 gc.set_threshold(1) | drop('<variable>')
  <new> = <x=variable>._handle; drop('<x>'); <new>.ptr()
  <new> = <x=variable>.flat; drop('<x>'); first(<new>)
  <new> = [<variable>]; <new>.append(<new>)
  <new> = iter(<x=variable>); next(<new>); drop('<x>'); next(<new>)
  <new> = iter(<array>); <new>.__setstate__(<integer>); next(<new>)
  <new> = Sub(made((2, 3))); <new>.itself = <new>; <new> @ <new>.permute((1, 0))
UNMADE 3
  <t=new> = unmade(<subclass>); <about>
about
  <t>.<reducing>(<making>) | <t>.<reducing>((<making>,), True) | <t>.pad([(<making>, 1)])
  <t>.reshape(<making>) | <t>.permute(<making>) | <t>[<making>] | <t>[<making>, None] = 1
  <t>.as_strided((<making>,), (1,)) | <t>.flip(<making>) | <t>.broadcast_to(<making>)
  <t>.process_slice(slice(<making>), 0) | <t> + np.array([<making>], object)
  _C.fill(<t>, <making>) | <t>.__dlpack__(max_version=(<making>, 0)) | _C.argmax(<t>, <making>)
  <t>[...] = [<making>] | operator.iadd(<t>, np.array([<making>], object)) | <t>.flat[<making>]
making
  Number(<small>, then=lambda: <t>.__init__(np.ones((2,) * <small>)))
  Float(1.5, then=lambda: <t>.__init__(np.ones((2,) * <small>)))
WALKING 3
  first(<array>) | first(zip(<x=variable>, <x>)) | <number> in <array> | first(reversed(<array>))
  a, *b = first(<array>) | first(enumerate(<array>.flat)) | operator.index(<array>)
  [0] * <array> | max(first(<array>)) | complex(<array>) | divmod(<array>, 2) | <array> % 2
  ~<array> | round(<array>) | sorted(first(<array>)) | format(<array>, '.2f') | range(9)[<array>]
  np.add(<array>, 1) | np.ones(3) + <array> | np.sum(<array>) | np.stack(first(<array>))
  bool(<array>) | {<array>: 1}
LIE 2
  *8 refused(lambda: _C.from_dlpack(capsule(<lie>)))
  *2 <new> = capsule((3,)); _C.from_dlpack(<new>); refused(lambda: _C.from_dlpack(<new>))
lie
  (2, 3), ndim=-1 | (2, 3), ndim=9 | (2, 3), ndim=2**31-1 | (2, -3) | (2**40, 2**40) | (2**62,)
  (2,), (2**62,) | (2, 2), (2**62, -2**62) | (2,), (-2**63,) | (3,), start=1 | (3,), byte_offset=2
  (3,), None, (2, 64, 1) | (3,), None, (2, 32, 2) | (3,), None, (5, 64, 1) | (3,), None, (0, 1, 1)
  (3,), device=(2, 0) | (3,), device=(99, 0) | (3,), device=(2, -1) | (3,), device=(2, 2**31-1)
  (3,), version=(2, 0) | (3,), version=(0, 9) | (3,), name=b'dltensor2' | (3,), name=b''
  (3,), name=b'used_dltensor'
  (3,), version=(1, 0), name=b'used_dltensor_versioned'
HUGE 3
  refused(lambda: <huge>)
huge
  wide(<n>) + 1 | wide(<n>) * wide(<n>) | wide(<n>).exp() | wide(<n>).copy()
  wide(<n>) @ made((2, 2))
  wide(<n>, 1) @ wide(1, <n>) @ wide(<n>, 1) | wide(<n>, 1) + wide(1, <n>) | wide(<n>) == 3
  wide(<n>).numpy() | wide(<n>).astype('int64') | wide(<n>).reshape(-1)[::2] + 1
  _C.empty((<n>, <n>, 2**20))
  wide(<x=n>).broadcast_to((3, <x>, 2, 2)) + 1
  made((2, 2)).pad(((<n>, <n>), (1, <n>))) | _C.Staging(<n>) | _C.Download(wide(<n>))
  bytes(wide(<n>)) | round_trip(wide(<n>), 4) | repr(wide(<n>))
  wide(<x=n>).permute((2, 0, 1)).reshape((<x> * 4 + 1,))
  _C.linear_fwd(wide(<n>)[:, 0, :], made((2, 2)), None, None) | _C.array(wide(<n>), 'bfloat16')
  wide(<n>)[...] + wide(<n>)[::-1]
  made((2, 2)).as_strided((<n>, 3), (1, 1))
  made((2, 2)).as_strided((2, 2), (<n>, <n>)) | wide(<n>).fill(1)
  _C.matmul(wide(<n>), wide(<n>), None) | np.asarray(wide(<n>)) + 1 | wide(<n>).compact()
  wide(<n>).flat[1:].copy()
n
  2**31 | 2**40 | 2**50 | 2**58
THREADED 1
  *4 <t=new> = made((70, 70), <good_dtype>); together(<call>, <call>, <call>)
  <t=new> = made((70, 70), <good_dtype>, 'transposed'); together(<call>, <call>, <call>)
  <t=new> = unmade(); together(<call>, lambda: <t>.__init__(np.ones((70, 70))), <call>)
call
  lambda: <t> + 1 | lambda: <t> @ <t> | lambda: <t>.fill(2) | lambda: operator.iadd(<t>, 1)
  lambda: <t>.sum(0) | lambda: <t>.copy() | lambda: <t>[1:] * <t>[:-1]
  lambda: operator.setitem(<t>, slice(1, None), <t>[:-1]) | lambda: <t>.numpy()
  lambda: repr(<t>) | lambda: <t>.astype('float16') | lambda: _C.from_dlpack(<t>)
  lambda: bytes(<t>) | lambda: drop('<t>') | lambda: <t>.reshape(-1).argmax()
  lambda: _C.cpu().empty_cache() | lambda: gc.collect(0) | lambda: _C.array(np.asarray(<t>))
  lambda: _C.Download(<t>).wait() | lambda: <t>.flat[3:].copy() | lambda: <t> + made((70, 71))
DEEP 1
  deep(lambda: <array> + <operand>, <room>)
  deep(lambda: _C.array([<plain>, <plain>]), <room>) | deep(lambda: repr(<array>), <room>)
  deep(lambda: _C.empty(<integers>), <room>) | deep(lambda: <array>[<key>], <room>)
  deep(lambda: <array>.tolist(), <room>)
room
  5 | 10 | 20 | 40
STRUCTURED 9
  <on_a_case>
WHOLE 7
  <new> = <on_letters>
GENERIC 14
  *8 <new> = <any_call>
MAKE 10
  <new> = <made>
changed
  <own_operand>[<peer>] | <own_operand>[<peer>] | <own_operand>[<peer>].flip() | <old>.flip()
  <old>[::-1] | <old>[1:] | <old>[..., :-1] | <old>[..., None] | <old>[None] | <old>[..., ::2]
  <old>[:0] | <old>.astype(<dtype>)
  <old>.permute(tuple(range(<old>.ndim))[::-1]) | <old>[:1].broadcast_to(<old>.shape) | None
  <thing> | <array> | unmade() | Sub(<old>) | <old> * 3 - 1 | <old>.view('int32')
  _C.NDArray.make(<old>.shape, <old>.strides, handle=<old>._handle)
  <old>.reshape(-1)[:1].as_strided(<old>.shape, (0,) * <old>.ndim)
"""
# Kinds of lines that change no array that was there before.
PURE = ("MAKE", "OPERATOR", "ELEMENTWISE", "REDUCTION", "METHOD", "INDEX", "COPYING", "WALKING")
# What differs from run to run: threads, and what the collector comes upon.
NEVER_THE_SAME = ("together", "aside", "gc.set_threshold")
