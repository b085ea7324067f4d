"""The profile of a CPU's seconds: what code and what operations they are counted as."""

from tests.bench.cpu_profile import _kind, _samples, _sources

REPORT = """# Samples: 17K of event 'cpu-clock:ppp'
 8921 ;libjax_common.so   ;[.] ynn::dot_fp32_5x64x1_1x16x1_avx512  ;-  -
 3377 ;libjax_common.so   ;[.] ynn::transpose_x32_avx512           ;-  -
   17 ;libjax_common.so   ;[.] jax::PyArray::layout                ;-  -
  215 ;libpython3.11.so.1.0;[.] _PyEval_EvalFrameDefault            ;-  -
    2 ;[JIT] tid 18059    ;[.] 0x00007feba0a4c1a8                  ;-  -
    1 ;[JIT] tid 18059    ;[.] 0x00007feba0ad80cd                  ;-  -
  112 ;[kernel.kallsyms]  ;[k] clear_page_erms                     ;-  -
   61 ;libcrypto.so.3     ;[.] sha256                              ;-  -
"""

TEXT = """HloModule jit__layer, is_scheduled=true

%fused (a: f32[2,3], b: f32[3,4]) -> f32[2,4] {
  %a = f32[2,3]{1,0} parameter(0)
  %b = f32[3,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(_layer)/while/body/dot_general"}
}

ENTRY %main (x: f32[2,3], w: f32[3,4]) -> f32[2,4] {
  %x = f32[2,3]{1,0} parameter(0)
  %w = f32[3,4]{1,0} parameter(1)
  %taken = f32[3,4]{1,0} gather(%w, %x), metadata={op_name="jit(_layer)/while/body/gather"}
  ROOT %ynn_fusion = f32[2,4]{1,0} fusion(%x, %taken), kind=kCustom, calls=%fused
}
"""


def test_samples_are_counted_by_symbol_and_else_by_library():
    assert _samples(REPORT) == {
        "products": 8921,
        "matrices and keys laid for products": 3377,
        "JAX and XLA's runtime": 17,
        "Python": 215,
        "XLA's other programs": 3,
        "the kernel": 112,
        "other libraries": 61,
    }


def test_operations_are_counted_by_what_jax_calls_them():
    sources = _sources(TEXT)
    assert sources["ynn_fusion"] == "jit(_layer)/while/body/dot_general"  # of what it fuses
    kinds = [_kind("jit__layer", name, sources[name]) for name in ("ynn_fusion", "taken")]
    assert kinds == ["attention's products", "pages taken out of the cache"]
    assert _kind("jit__layer", "ynn_fusion.4", "jit(_layer)/dot_general") == (
        "linear layers' products"
    )
    assert _kind("jit__leave_step", "ynn_fusion", "") == "products with the table of words"
    assert _kind("jit__leave_step", "iota_reduce_fusion", "") == "choice of tokens"
