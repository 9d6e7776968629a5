"""Bytes of programs as compilers of accelerators print them."""

from edgc_jax.measure import hlo

# Collectives that begin with `-start` name their operands in their types.
ASYNCHRONOUS = """HloModule step
ENTRY %main (p: f32[2]) -> f32[8] {
  %p = f32[2]{0} parameter(0)
  %g = (f32[2]{0}, f32[8]{0}) all-gather-start(f32[2]{0} %p), replica_groups={{0,1,2,3}}, dimensions={0}
  %h = f32[8]{0} all-gather-done((f32[2]{0}, f32[8]{0}) %g)
  %c = (f32[2]{0}, f32[2]{0}, u32[], u32[]) collective-permute-start(f32[2]{0} %p), source_target_pairs={{0,1},{1,0}}
  %a = ((u8[4]{0}, u8[4]{0}), (u8[4]{0}, u8[4]{0})) all-to-all-start(u8[4]{0} %p, u8[4]{0} %p), replica_groups={{0,1}}
  %r = (f32[2]{0}, f32[1]{0}) all-reduce-start(f32[2]{0} %p, f32[1]{0} %q), replica_groups={{0,1}}
}
"""  # noqa: E501


def test_asynchronous_collectives_have_the_results_of_others():
  found = hlo.collectives_in_order(ASYNCHRONOUS)
  assert [(one.kind, one.results) for one in found] == [
    ("all-gather", (("f32", (8,)),)),
    ("collective-permute", (("f32", (2,)),)),
    ("all-to-all", (("u8", (4,)), ("u8", (4,)))),
    ("all-reduce", (("f32", (2,)), ("f32", (1,)))),
  ]
  # Half of a gather and of an all-to-all; whole permutes and all-reduces.
  assert hlo.wire_bytes_outside_branches(ASYNCHRONOUS) == 16 + 8 + 4 + 12
