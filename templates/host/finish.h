// Launching the finish kernels behind a step.
#pragma once
#include "rows.h"

namespace coda::host {

// Operands and results behind a row kernel, which are counted by two loops.
template <class Parameters> int bind_loops(Call const& call, Finishing const& finishing, Parameters& p) {
  int64_t inner = call.sizes.value(finishing.inner);
  RowAccess const* access = finishing.accesses;
  for (int i = 0; i < finishing.operand_count; ++i) {
    RowTensor t{};
    if (int status = bind_row_tensor(call, *access++, t)) return status;
    p.operands[finishing.partial_count + i] = {t.data, t.level[1], 0, t.level[0], t.value, inner, t.integer};
  }
  for (int i = 0; i < finishing.result_count; ++i) {
    RowTensor t{};
    if (int status = bind_row_tensor(call, *access++, t)) return status;
    p.outputs[i] = {t.data, t.level[1], 0, 0, 0, int32_t(inner), t.level[0]};
  }
  return CODA_OK;
}

// What a finish kernel behind a batched GEMM counts through in each batch; 0 where it is one run: columns of all batches,
// or all there is.
inline int64_t inner_size(Call const& call, Finishing const& finishing) {
  if (!call.step->gemm->batched || finishing.kind == StoreKind::kTotal) return 0;
  if (finishing.kind == StoreKind::kRow) return call.rows;
  return call.step->stores[finishing.partials[0]].batch_dim < 0 ? 0 : call.columns;
}

// The same behind a GEMM, of whose results a kernel makes one for each row, for each column, or in all.
template <class Parameters> int bind_directions(Call const& call, Finishing const& finishing, Parameters& p) {
  int64_t const inner = inner_size(call, finishing);
  for (int i = 0; i < finishing.operand_count; ++i) {
    coda::Operand& operand = p.operands[finishing.partial_count + i];
    Operand const& spec = finishing.operands[i];
    if (int status = bind_operand(*call.program, call.views, call.sizes, call.columns, spec, operand)) return status;
    if (inner && operand.data)
      operand.row += operand.column, operand.lane = batch_pitch(call.views[spec.arg], spec, call.rows, call.columns), operand.extent = inner;
  }
  for (int i = 0; i < finishing.result_count; ++i) {
    Store const& spec = finishing.results[i];
    coda::Output& result = p.outputs[i] = bind_output(call.views, call.rows, call.columns, spec);
    if (!inner) continue;
    result.row += result.column, result.rows_per_batch = int32_t(inner);
    result.batch = batch_pitch(call.views[spec.arg], spec, call.rows, call.columns);
  }
  for (int i = 0; i < finishing.kept_count; ++i)
    p.outputs[finishing.result_count + i] = {slot(call, call.step->store_count + i), 1, 0, 0, 0};
  return CODA_OK;
}

// How many batches the rows come from that become one value.
inline int64_t reduced_batches(Call const& call, Finishing const& finishing) {
  return call.step->gemm && inner_size(call, finishing) == 0 ? call.batches : 1;
}

// A finish kernel; Finishing::launch points to the instance. With nothing to reduce it writes what a reduction over
// nothing is.
template <int kOperands, int kOutputs>
int launch_finish(Call& call, Finishing const& finishing, cudaStream_t stream) {
  Finish<kOperands, kOutputs> p{};
  p.length = int32_t(counts(call, finishing.partials[0]).length);
  p.extent = finishing.kind == StoreKind::kRow ? call.columns : call.rows * reduced_batches(call, finishing);
  if (p.length == 0) return CODA_OK;
  for (int i = 0; i < finishing.partial_count; ++i)
    p.operands[i] = partial_operand(slot(call, finishing.partials[i]), finishing.kind, counts(call, finishing.partials[i]));
  if (int status = finishing.accesses ? bind_loops(call, finishing, p) : bind_directions(call, finishing, p)) return status;
  return launch(call, finishing.kernel, dim3(unsigned(ceil_div(p.length, 32))), dim3(32, 16), stream, &p);
}

}  // namespace coda::host
