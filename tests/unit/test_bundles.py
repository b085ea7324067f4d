"""tests/hlo/bundles.py: how often the bundles of a TPU's kernels run, from what libtpu writes."""

import json
import subprocess
import sys

import pytest

from tests.hlo.bundles import Bundles, take

# A loop of 2 + 1 bundles and 4 behind its branch, which moves 2 x 128 bytes a turn; a part of two
# bundles runs in its first turn alone. {limit} is a number, or a register that is loaded.
LOOP = """\
= control target key start
LB: loop body
= control target key end

     0   :  {{ %s9_s3 = {limit}  ;;  %s10_s1 = smov 0 /* copy for cssa */ }}
   0x1 LB: > {{ %p4_p0 = scmp.ne.s32.totalorder %s11_s1, 0  ;;  %s11_s1 = sphi %s10_s1, %s12_s1 /* phi copy */ }} /* Start region 7 */
   0x2   : > {{ %20 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s1_s8, /*size_in_granules=*/4, /*vmem=*/%s2_s9  ;;  %30 = sbr.rel (%p4_p0) target = $region8 }}
   0x3   : > {{ %v3 = vadd.f32 %v1, %v2 }}
   0x4   : > {{ }}
   0x5   : > {{ }}
   0x6   : > {{ }} /* End region 5 */
   0x7   : > {{ %v5 = vmul.f32 %v3, %v3 }}
   0x8   : > {{ %v6 = vmul.f32 %v5, %v5 }}
   0x9 PF: > {{ %s12_s1 = sadd.s32 1, %s11_s1 }} /* Start/End empty region 8 */
   0xa   : > {{ %p5_p1 = scmp.ge.s32.totalorder %s12_s1, %s9_s3 /* loop exit test */ }}
   0xb   :  {{ %31 = sbr.rel (!%p5_p1) target = $region7 }}
   0xc   :  {{ %21 = dma.vmem_to_hbm [thread:$0]  /*vmem=*/%s1_s8, /*size_in_granules=*/4, /*hbm=*/%s2_s9 }}
   0xd   :  {{}}
   0xe   :  {{}}
   0xf   :  {{}} /* End region 9 */
  0x10   :  {{ %s40 = smov 1 }}
"""
TURN, FIRST = 13, 2


def written(folder, text, name="kernel.1"):
    (folder / f"123-{name}-01-final_bundles.txt").write_text(text)
    (folder / f"123-{name}-00-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (folder / "123-<late-finalization>-01-final_bundles.txt").write_text(text)


@pytest.mark.parametrize("turns", [1, 2, 63, 64, 65, 66, 67, 1000, 1_000_000])
def test_turns_that_the_text_decides_are_multiplied_out(tmp_path, turns):
    written(tmp_path, LOOP.format(limit=f"smov {turns}"))
    assert take(tmp_path) == {"kernel.1": Bundles(2 + turns * TURN + FIRST)}
    assert not list(tmp_path.iterdir())  # the next program's are another's
    assert take(tmp_path) == {}


def test_turns_that_data_decide_follow_from_the_bytes_that_they_move(tmp_path):
    written(tmp_path, LOOP.format(limit="sld [smem:[#allocation3]]"))
    kernel = take(tmp_path)["kernel.1"]
    assert kernel == Bundles(2, TURN + FIRST, 256)
    assert kernel.cycles(10 * 256) == 2 + 10 * (TURN + FIRST)
    assert Bundles(7).cycles(10 * 256) == 7


COMPILED = """
import json, os
os.environ |= {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": "--xla_tpu_scoped_vmem_limit_kib=16384"}
from tests.bench.twins import of_twins
from tests.hlo.bundles import dumping, take
with dumping() as folder:
    import jax, jax.numpy as jnp
    from jax.experimental import pallas as pl
    from mmqa_jax.plan.topology import open_topology
    device = open_topology("v5e:2x2").devices[0]
    mesh = jax.sharding.Mesh([device], "x")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    def shape(*sizes, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]
    def doubled(x):
        block = pl.BlockSpec((8, 128), lambda n: (n, 0))
        return pl.pallas_call(double, x, grid=(x.shape[0] // 8,), in_specs=[block], out_specs=block)(x)
    found = []
    programs = [(doubled, shape(8 * 50, 128)), (doubled, shape(8 * 500, 128)),
                (lambda x: x @ x, shape(2048, 2048, dtype=jnp.bfloat16)),
                (lambda x: jnp.sort(x, axis=1), shape(8, 1024))]
    for function, argument in programs:
        text = jax.jit(function).lower(argument).compile().as_text()
        found.append({name: kernel.fixed for name, kernel in take(folder).items() if f"%{name} = " in text})
print(json.dumps([sorted(kernels.values())[-1] for kernels in found]))
print(json.dumps([os.path.exists(folder), os.environ["LIBTPU_INIT_ARGS"]]))
try:
    dumping().__enter__()
except RuntimeError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.slow
def test_what_libtpu_writes_is_counted():
    pytest.importorskip("libtpu")
    ran = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    counted, left, refusal = map(json.loads, ran.stdout.splitlines())
    few, many, product, sort = counted
    assert many - few == pytest.approx(450 * (many / 500), rel=0.1)  # ten times the grid
    assert left == [False, "--xla_tpu_scoped_vmem_limit_kib=16384"]
    assert "in a process of its own" in refusal  # libtpu reads its flags once
    # Four matrix units of 128 x 128: 2,048 x 2,048 x 2,048 products take 131,072 cycles at the peak
    # of the data sheet. The sort exchanges in 55 rounds, each of 8 registers and more.
    assert 0.9 * 2048**3 / (4 * 128 * 128) < product < 1.5 * 2048**3 / (4 * 128 * 128)
    assert sort > 55 * 8
