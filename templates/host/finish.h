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

// The same behind a GEMM, of whose results a kernel makes one for each row, for each column, or in all.
template <class Parameters> int bind_directions(Call const& call, Finishing const& finishing, Parameters& p) {
  for (int i = 0; i < finishing.operand_count; ++i) {
    coda::Operand& operand = p.operands[finishing.partial_count + i];
    Operand const& spec = finishing.operands[i];
    if (int status = bind_operand(*call.program, call.views, call.sizes, call.columns, spec, operand)) return status;
  }
  for (int i = 0; i < finishing.result_count; ++i)
    p.outputs[i] = bind_output(call.views, call.columns, finishing.results[i]);
  for (int i = 0; i < finishing.kept_count; ++i)
    p.outputs[finishing.result_count + i] = {slot(call, call.step->store_count + i), 1, 0, 0, 0};
  return CODA_OK;
}

// A finish kernel; Finishing::launch points to the instance. With nothing to reduce it writes what a reduction over
// nothing is.
template <int kOperands, int kOutputs>
int launch_finish(Call& call, Finishing const& finishing, cudaStream_t stream) {
  Finish<kOperands, kOutputs> p{};
  p.length = int32_t(counts(call, finishing.partials[0]).length);
  p.extent = finishing.kind == StoreKind::kRow ? call.columns : call.rows;
  if (p.length == 0) return CODA_OK;
  for (int i = 0; i < finishing.partial_count; ++i)
    p.operands[i] = partial_operand(slot(call, finishing.partials[i]), finishing.kind, counts(call, finishing.partials[i]));
  if (int status = finishing.accesses ? bind_loops(call, finishing, p) : bind_directions(call, finishing, p)) return status;
  return launch(call, finishing.kernel, dim3(unsigned(ceil_div(p.length, 32))), dim3(32, 16), stream, &p);
}

}  // namespace coda::host
