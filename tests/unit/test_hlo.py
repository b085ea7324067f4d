"""tests/hlo: what is counted of compiled programs (FLOPs, bytes, loops, collectives)."""

import jax
import jax.numpy as jnp
import pytest

from mmqa_jax.core.chips import GPUS, TPUS
from mmqa_jax.core.flops import jaxpr_flops, traced_flops
from mmqa_jax.models.attention.fused import fused_attention
from mmqa_jax.plan.program import Program
from mmqa_jax.plan.topology import Topology
from tests.bench.plan import Counted, CountedBound
from tests.bench.steps import hidden_cycles
from tests.hlo.collectives import Collective, axis_of, groups
from tests.hlo.counts import count
from tests.hlo.text import arrays, parse
from tests.refusals import refuses

pytestmark = pytest.mark.slow

LAYERS, ROWS, WIDTH = 5, 8, 16


def chain(weights, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()


@pytest.fixture(scope="module")
def scanned():
    """A compiled gradient through five scanned layers."""
    shapes = jnp.ones((LAYERS, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))
    return jax.jit(jax.grad(chain)).lower(*shapes).compile(), shapes


def test_a_loop_counts_as_often_as_it_turns(scanned):
    compiled, shapes = scanned
    # Forward, gradient of the input (not of the first) and of the weights; one turn of the
    # backward loop computes all, also what is not used.
    product = 2 * ROWS * WIDTH * WIDTH
    counts = count(compiled.as_text())
    assert counts.loops == [LAYERS, LAYERS]
    assert counts.total_flops == 3 * LAYERS * product
    # XLA's own analysis counts each body once.
    assert compiled.cost_analysis()["flops"] < counts.total_flops
    assert traced_flops(jax.grad(chain), *shapes) == 3 * LAYERS * product


def test_bytes_without_loops_are_those_of_xla():
    arguments = jnp.ones((64, 128)), jnp.ones((128, 256))
    compiled = jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(*arguments).compile()
    expected = compiled.cost_analysis()["bytes accessed"]
    assert count(compiled.as_text()).bytes == expected


def test_an_update_in_place_is_not_a_copy():
    def write(cache, row, at):
        return jax.lax.dynamic_update_slice(cache, row, (at, 0))

    cache, row = jnp.ones((4096, 64)), jnp.ones((1, 64))
    compiled = jax.jit(write, donate_argnums=0).lower(cache, row, 3).compile()
    counts = count(compiled.as_text())
    assert counts.bytes < 10 * row.nbytes
    assert counts.copies == 0
    kept = jax.jit(write).lower(cache, row, 3).compile()
    assert count(kept.as_text()).bytes >= 2 * cache.nbytes


def test_reading_a_slice_is_not_reading_the_whole():
    def read(cache, at):
        return jnp.exp(jax.lax.dynamic_slice_in_dim(cache, at, 2)).sum()

    compiled = jax.jit(read).lower(jnp.ones((4096, 64)), 3).compile()
    assert count(compiled.as_text()).bytes < 10 * 2 * 64 * 4


def test_what_stops_the_device_comes_on_top():
    near = Collective("all-reduce", "tensor", 8, 1, 8e9, links=2)  # 14 GB at 100 GB/s
    v5e = TPUS["v5e"]
    assert near.exposed_seconds(v5e) == near.seconds(v5e) == pytest.approx(0.14)
    beside = near._replace(hidden_cycles=0.1 * v5e.clock)
    assert beside.exposed_seconds(v5e) == pytest.approx(0.04)
    assert near._replace(hidden_cycles=float("inf")).exposed_seconds(v5e) == 0
    assert CountedBound(compute=0.2, hbm=0.1, interconnect=0.14, exposed=0.14).seconds == 0.34
    assert CountedBound(
        compute=0.2, hbm=0.1, interconnect=0.14, exposed=0.04
    ).seconds == pytest.approx(0.24)
    assert CountedBound(compute=0.2, hbm=0.1, interconnect=0.5, exposed=0).seconds == 0.5


def test_a_program_beside_what_it_needs_at_least(scanned):
    compiled, shapes = scanned
    program = Program(
        "train", lambda: jax.jit(jax.grad(chain)).trace(*shapes), {}, lambda: 1e6, 100.0
    )
    chips = Topology("local", (jax.devices()[0],), (0,), GPUS["h100"])
    row = Counted.compiled_for(program, chips).row()
    counts = count(compiled.as_text())
    assert (row["flops"], row["loops"]) == (counts.total_flops, 2)
    assert row["hbm_bytes"] == counts.bytes > row["floor_bytes"]
    assert row["bound_ms"] == pytest.approx(1e3 * counts.bytes / GPUS["h100"].hbm_rate)
    assert row["estimated_ms"] is None  # that of a CPU's compiler


# What the TPU's compiler writes: no trip count, dots as dilated convolutions, on-chip memory S(1),
# collectives that run beside fusions and stand in each of them, a reduce-scatter as a fusion.
TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %sum = f32[]{:T(128)} add(%a, %b)
}

%start (p: bf16[64,128]) -> (bf16[64,128], bf16[128,128]) {
  %p = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.1 = bf16[128,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}, use_global_device_ids=true, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %c = (bf16[64,128]{1,0}, bf16[128,128]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%done (q: bf16[64,128]) -> bf16[128,128] {
  %q = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.2 = bf16[128,128]{1,0:T(8,128)(2,1)} all-gather(%q), channel_id=7, replica_groups=[2,2]<=[4], dimensions={0}, use_global_device_ids=true, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %d = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} custom-call(%all-gather.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter.3 (g: f32[128,128]) -> f32[64,128] {
  %g = f32[128,128]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[128,128]{1,0:T(8,128)} all-reduce(%g), channel_id=9, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %part = f32[64,128]{1,0:T(8,128)} dynamic-slice(%all-reduce.1, %zero, %zero), dynamic_slice_sizes={64,128}
}

%body (t: (s32[], bf16[64,128], f32[128,128])) -> (s32[], bf16[64,128], f32[128,128]) {
  %t = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, f32[128,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %w = bf16[64,128]{1,0:T(8,128)(2,1)} get-tuple-element(%t), index=1
  %f = f32[128,128]{1,0:T(8,128)} get-tuple-element(%t), index=2
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %async-collective-start = (bf16[64,128]{1,0}, bf16[128,128]{1,0}) fusion(%w), kind=kCustom, calls=%start
  %async-collective-done = bf16[128,128]{1,0:T(8,128)(2,1)S(1)} fusion(%w), kind=kCustom, calls=%done
  %conv = f32[128,128]{1,0:T(8,128)} convolution(%async-collective-done, %async-collective-done), dim_labels=bf_io->bf
  %kernel = f32[8]{0:T(128)} custom-call(%conv), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{}"
}}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"100","transcendentals":"0","bytes_accessed":"64"}}}
  %scattered = f32[64,128]{1,0:T(8,128)} fusion(%conv), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %out = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, f32[128,128]{1,0:T(8,128)}) tuple(%next, %w, %conv)
}

%condition (t.1: (s32[], bf16[64,128], f32[128,128])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  %t.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, f32[128,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%t.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %limit), direction=LT
}

ENTRY %main (x: bf16[64,128], y: f32[128,128], q: bf16[8,16,32], k: bf16[8,16,32]) -> (f32[128,128], bf16[8,16,16]) {
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  %y = f32[128,128]{1,0:T(8,128)} parameter(1)
  %q.1 = bf16[8,16,32]{2,1,0:T(8,128)(2,1)} parameter(2)
  %k.1 = bf16[8,16,32]{2,1,0:T(8,128)(2,1)} parameter(3)
  %from = s32[]{:T(128)} constant(2)
  %tuple = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, f32[128,128]{1,0:T(8,128)}) tuple(%from, %x, %y)
  %while.1 = (s32[]{:T(128)}, bf16[64,128]{1,0:T(8,128)(2,1)}, f32[128,128]{1,0:T(8,128)}) while(%tuple), condition=%condition, body=%body
  %batched = bf16[8,16,16]{2,1,0:T(8,128)(2,1)} convolution(%q.1, %k.1), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf
  %result = f32[128,128]{1,0:T(8,128)} get-tuple-element(%while.1), index=2
  %copy.1 = f32[128,128]{0,1:T(8,128)} copy(%result)
  ROOT %both = (f32[128,128]{0,1:T(8,128)}, bf16[8,16,16]{2,1,0:T(8,128)(2,1)}) tuple(%copy.1, %batched)
}
"""


def test_what_the_tpu_compiler_writes():
    counts = count(TPU)
    assert counts.loops == [10]  # from 2 to 12
    dots = 10 * 2 * 128 * 128 * 128
    assert counts.flops == {"bf16": dots + 8 * 2 * 16 * 16 * 32, "f32": 10 * 100}
    assert not counts.unknown
    found = {one.kind: one for one in counts.on_mesh({"data": 2, "tensor": 2})}
    assert found.keys() == {"all-gather", "reduce-scatter"}
    assert found["all-gather"][1:5] == ("tensor", 2, 10, 10 * 128 * 128 * 2)
    assert found["reduce-scatter"][1:5] == ("data", 2, 10, 10 * 128 * 128 * 4)
    assert (counts.copies, counts.copied_bytes) == (1, 128 * 128 * 4)
    assert sum(a.hbm_bytes for a in arrays("(f32[4]{0:S(1)}, f32[2]{0:T(8)})")) == 8


GPU = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (a: bf16[32,64], b: bf16[64,16]) -> f32[32,16] {
  %a = bf16[32,64]{1,0} parameter(0)
  %b = bf16[64,16]{1,0} parameter(1)
  %cublas-gemm.1 = (f32[32,16]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %gte = f32[32,16]{1,0} get-tuple-element(%cublas-gemm.1), index=0
  %all-reduce-start = f32[32,16]{1,0} all-reduce-start(%gte), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
  ROOT %all-reduce-done = f32[32,16]{1,0} all-reduce-done(%all-reduce-start)
}
"""


def test_what_the_gpu_compiler_writes():
    counts = count(GPU)
    assert counts.flops == {"bf16": 2 * 32 * 16 * 64}
    (reduced,) = counts.on_mesh({"data": 8}, hosts=[0] * 4 + [1] * 4)
    assert reduced == Collective("all-reduce", "data", 8, 1, 32 * 16 * 4, True)
    assert reduced.sent_bytes == 2 * 7 / 8 * 32 * 16 * 4


SPARSE_CORES = """\
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%called_computation.1 (p: bf16[1,64,128], t: token[]) -> (bf16[1,64,128]) {
  %p = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %t = token[] parameter(1)
  ROOT %all-reduce.16 = (bf16[1,64,128]{2,1,0:T(8,128)(2,1)}) all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (g: bf16[1,64,128]) -> bf16[1,64,128] {
  %g = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %prepared = s32[]{:S(2)} custom-call(), custom_call_target="PrepareAsyncCallStart"
  %token = token[] custom-call(%prepared), custom_call_target="PrepareAsyncCallDone"
  %started = ((bf16[1,64,128]{2,1,0:T(8,128)(2,1)}, token[]), (bf16[1,64,128]{2,1,0:T(8,128)(2,1)})) call-start(%g, %token), async_execution_thread="sparsecore", to_apply=%called_computation.1
  %done = (bf16[1,64,128]{2,1,0:T(8,128)(2,1)}) call-done(%started)
  ROOT %reduced = bf16[1,64,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%done), index=0
}
"""


def test_a_reduction_on_sparse_cores():
    counts = count(SPARSE_CORES)
    assert counts.on_mesh({"data": 4}) == [
        Collective("all-reduce", "data", 4, 1, 64 * 128 * 2, False)
    ]
    assert counts.bytes == 2 * 64 * 128 * 2  # read and written
    assert not counts.unknown


CUDNN = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[8,512,32,128], k: bf16[8,1024,8,128], v: bf16[8,1024,8,128]) -> bf16[8,32,512,128] {
  %q = bf16[8,512,32,128]{3,2,1,0} parameter(0)
  %k = bf16[8,1024,8,128]{3,2,1,0} parameter(1)
  %v = bf16[8,1024,8,128]{3,2,1,0} parameter(2)
  %f = (bf16[8,32,512,128]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %o = bf16[8,32,512,128]{3,1,2,0} get-tuple-element(%f), index=0
}
"""


def test_cudnns_attention():
    product = 2 * 8 * 32 * 512 * 1024 * 128
    counts = count(CUDNN)
    assert counts.flops == {"bf16": 2 * product}
    assert counts.bytes == 2 * (2 * 8 * 512 * 32 * 128 + 2 * 8 * 1024 * 8 * 128)
    assert not counts.unknown
    assert count(CUDNN.replace("Softmax", "SoftmaxBackward")).flops == {"bf16": 5 * product}


TRITON = """\
HloModule jit_f, is_scheduled=true

ENTRY %main (q: bf16[8,8,4,128], n: s32[8], k: bf16[8,8,128,1024]) -> f32[8,8,1,4,128] {
  %q = bf16[8,8,4,128]{3,2,1,0} parameter(0)
  %n = s32[8]{0} parameter(1)
  %k = bf16[8,8,128,1024]{3,2,1,0} parameter(2)
  ROOT %out = f32[8,8,1,4,128]{4,3,2,1,0} custom-call(%q, %n, %k), custom_call_target="__gpu$xla.gpu.triton", api_version=API_VERSION_TYPED_FFI, backend_config={grid_x = 8 : i32, ir = "ML\\EFR{(\\22", serialized_metadata = "{\\22flops\\22: \\22FLOPS\\22, \\22bytes_accessed\\22: \\22BYTES\\22}"}
}
"""


def test_a_gpus_kernel_states_what_it_does():
    counts = count(TRITON.replace("FLOPS", "4096").replace("BYTES", "512"))
    assert counts.flops == {"bf16": 4096}
    assert counts.bytes == 512
    assert not counts.unknown


PARTIAL_SUMS = """\
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%part (x: f32[4,64,384]) -> f32[64,128] {
  %x = f32[4,64,384]{2,1,0} parameter(0)
  %zero = f32[] constant(0)
  %whole = f32[64,384]{1,0} reduce(%x, %zero), dimensions={0}, to_apply=%add
  ROOT %part = f32[64,128]{1,0} slice(%whole), slice={[0:64], [128:256]}
}

ENTRY %main (x: f32[4,64,384]) -> f32[64,128] {
  %x = f32[4,64,384]{2,1,0} parameter(0)
  ROOT %fusion = f32[64,128]{1,0} fusion(%x), kind=kLoop, calls=%part
}
"""


def test_of_sums_that_are_sliced_only_these_are_read():
    """A product in four parts (split K), of which another fusion adds up the keys."""
    assert count(PARTIAL_SUMS).bytes == 4 * (4 * 64 * 128 + 64 * 128)


def test_an_array_with_many_paths_to_the_root_is_counted_in_time():
    """Random bits are made of sums of sums."""
    pair = "  %x{1} = f32[9]{{0}} add(%x{0}, %y{0})\n  %y{1} = f32[9]{{0}} multiply(%x{0}, %y{0})\n"
    text = (
        "HloModule jit_f\n\n%inner (x0: f32[9]) -> f32[9] {\n  %x0 = f32[9]{0} parameter(0)\n"
        "  %y0 = f32[9]{0} negate(%x0)\n"
        + "".join(pair.format(n, n + 1) for n in range(64))
        + "  ROOT %out = f32[9]{0} add(%x64, %y64)\n}\n\n"
        "ENTRY %main (p: f32[9]) -> f32[9] {\n  %p = f32[9]{0} parameter(0)\n"
        "  ROOT %f = f32[9]{0} fusion(%p), kind=kLoop, calls=%inner\n}\n"
    )
    assert count(text).bytes == 2 * 9 * 4


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    text = TPU.replace("constant(12)", "constant({...})")
    counts = count(text)
    assert counts.loops == [None]
    assert counts.flops["bf16"] == 2 * 128**3 + 8 * 2 * 16 * 16 * 32


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", "tensor"),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", "fsdp"),
        ("replica_groups=[2,4]<=[8]", "fsdp+tensor"),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", "data"),
        ("replica_groups={}", "data+fsdp+tensor"),
        ("source_target_pairs={{0,4},{4,0}}", "data"),
        ("replica_groups={{0,9}}", "?"),
    ],
)
def test_mesh_axis_of_a_group(text, axis):
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert axis_of(groups(text, 8), mesh) == axis


def test_other_text_is_refused():
    refuses("no entry computation", parse, "module @jit_f { }", error=ValueError)


def test_the_texts_of_this_file_are_read_whole():
    """A line that is not understood would be left out silently."""
    for text in (TPU, GPU):
        lines = [line for line in text.splitlines() if " = " in line]
        module = parse(text)
        assert sum(len(c.instructions) for c in module.computations.values()) == len(lines)


INT8 = """\
HloModule jit_f, is_scheduled=true

%retiled (x: s8[32,256,128]) -> s8[32,256,128] {
  %x = s8[32,256,128]{1,2,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = s8[32,256,128]{1,2,0:T(8,128)(4,1)} copy(%x)
}

%layer (x: s8[32,256,128], n: s32[]) -> s8[256,128] {
  %x = s8[32,256,128]{1,2,0:T(32,128)(4,1)} parameter(0)
  %seen = s8[32,256,128]{1,2,0:T(8,128)(4,1)} fusion(%x), kind=kLoop, calls=%retiled
  %n = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = s8[1,256,128]{1,2,0:T(8,128)(4,1)} dynamic-slice(%seen, %n, %zero, %zero), dynamic_slice_sizes={1,256,128}
  ROOT %flat = s8[256,128]{0,1:T(8,128)(4,1)} bitcast(%one)
}

%product (x: s8[32,256,128], n: s32[], y: bf16[64,256]) -> bf16[64,128] {
  %y = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(2)
  %x = s8[32,256,128]{1,2,0:T(32,128)(4,1)} parameter(0)
  %n = s32[] parameter(1)
  %matrix = s8[256,128]{0,1:T(8,128)(4,1)} fusion(%x, %n), kind=kLoop, calls=%layer
  ROOT %out = bf16[64,128]{1,0:T(8,128)(2,1)} convolution(%y, %matrix), dim_labels=bf_io->bf
}

ENTRY %main (x: s8[32,256,128], n: s32[], y: bf16[64,256]) -> bf16[64,128] {
  %x = s8[32,256,128]{1,2,0:T(32,128)(4,1)} parameter(0)
  %n = s32[] parameter(1)
  %y = bf16[64,256]{1,0:T(8,128)(2,1)} parameter(2)
  ROOT %fusion = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%x, %n, %y), kind=kOutput, calls=%product, backend_config={"window_config":{"estimated_cycles":"1500"}}
}
"""


def test_a_layer_read_from_an_int8_stack_is_one_layer():
    """XLA for TPUs sees the stack in another tiling first, which moves nothing."""
    counts = count(INT8)
    layer, scalar, rows, out = 256 * 128, 4, 64 * 256 * 2, 64 * 128 * 2
    assert counts.bytes == layer + scalar + rows + out
    assert counts.cycles == 1500


@pytest.mark.parametrize(("per_byte", "hidden"), [(0.01, 10 * 327.68), (1.0, 10 * 500)])
def test_a_gather_in_steps_is_hidden_by_all_its_fusions(per_byte, hidden):
    text = TPU.replace("calls=%start", 'calls=%start, backend_config={"estimated_cycles":"200"}')
    text = text.replace("calls=%done", 'calls=%done, backend_config={"estimated_cycles":"300"}')
    assert hidden_cycles(text, "all-gather", per_byte) == pytest.approx(hidden)
    assert hidden_cycles(text, "all-reduce", per_byte) == 0


def test_a_kernels_flops_are_those_that_it_states():
    """Heads of 64 columns fill half of what the matrix unit multiplies at once."""
    rows, length, heads, size = 2, 16, 4, 64
    shape = jnp.ones((rows, length, heads, size), jnp.bfloat16)

    def attend(q):
        return fused_attention(q, q, q, interpret=True)

    assert traced_flops(attend, shape) == 4 * rows * heads * length * length * size
    traced = jax.make_jaxpr(attend)(shape).jaxpr
    assert jaxpr_flops(traced, kernels_only=True) == 0  # the compiled program states it, too
