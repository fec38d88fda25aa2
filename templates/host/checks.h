// The requirements of a program, evaluated. Same records, same order and same sentences as `failure` in
// coda/target/requirements.py; a property test holds the two together, so change both.
#pragma once
#include "views.h"

namespace coda::host {

// Values of the variables that sizes are made of; -1: not fixed yet.
struct Sizes {
  int64_t values[kMaxVariables];
  int fixed_by[kMaxVariables];
  int64_t value(Extent const& e) const { return e.offset + (e.variable >= 0 ? e.coefficient * values[e.variable] : 0); }
};

// One evaluation: the sizes so far and the two numbers a sentence may show.
struct Evaluation {
  Program const& program;
  View const* views;
  Sizes& sizes;
  int64_t got = 0, want = 0;

  bool compare(int64_t g, int64_t w, bool met) {
    got = g, want = w;
    return met;
  }
};

inline bool stands_for_all(Program const& program, Requirement const& need, View const& v) {
  return program.args[need.arg].vector && (v.rank == 0 || (v.rank == 1 && v.shape[0] == 1));
}

// -- of sizes --------------------------------------------------------------------------------------------------------

inline bool product_met(Evaluation& e, Requirement const& need) {
  int64_t* values = e.sizes.values;
  int64_t total = 1, size = values[need.dim];
  int unknown = 0, last = -1;
  for (int i = 0; i < e.program.variable_count; ++i) {
    if (!(need.value >> i & 1)) continue;
    if (values[i] < 0) ++unknown, last = i;
    else total *= values[i];
  }
  if (size < 0 && unknown == 0) return values[need.dim] = total, true;
  if (size >= 0 && unknown == 1) {
    values[last] = total ? size / total : 0;
    return e.compare(size, total, size == values[last] * total);
  }
  return e.compare(size, total, size < 0 || unknown > 0 || size == total);
}

inline bool size_met(Evaluation& e, Requirement const& need, View const& v) {
  if (stands_for_all(e.program, need, v)) return true;
  int64_t size = v.shape[need.dim];
  int variable = need.extent.variable;
  if (variable >= 0 && e.sizes.values[variable] < 0) {
    e.sizes.values[variable] = (size - need.extent.offset) / need.extent.coefficient;
    e.sizes.fixed_by[variable] = need.arg;
    return true;
  }
  int64_t want = e.sizes.value(need.extent);
  return e.compare(size, want, size == want);
}

inline bool divisible_met(Evaluation& e, Requirement const& need, View const& v) {
  if (stands_for_all(e.program, need, v)) return true;
  int64_t got = v.shape[need.dim] - need.extent.offset;
  return e.compare(v.shape[need.dim], 0, got >= 0 && got % need.extent.coefficient == 0);
}

inline bool rank_met(Evaluation& e, Requirement const& need, View const& v) {
  bool one = v.rank == 1 && v.shape[0] == 1;
  bool broadcast = stands_for_all(e.program, need, v) || (need.value == 0 && one), negative = false;
  for (int i = 0; i < v.rank && i < kMaxRank; ++i) negative = negative || v.shape[i] < 0;
  return e.compare(v.rank, need.value, !negative && (v.rank == need.value || broadcast));
}

// -- of layout -------------------------------------------------------------------------------------------------------

// Each dim steps over all that the faster ones cover, so no element is stored twice.
inline bool distinct_met(View const& v) {
  int64_t stride[kMaxRank], size[kMaxRank];
  int count = 0;
  for (int i = 0; i < v.rank; ++i) {
    if (v.shape[i] <= 1) continue;
    int64_t s = v.strides[i] < 0 ? -v.strides[i] : v.strides[i];
    int at = count++;
    for (; at > 0 && stride[at - 1] > s; --at) stride[at] = stride[at - 1], size[at] = size[at - 1];
    stride[at] = s, size[at] = v.shape[i];
  }
  int64_t reach = 0;
  for (int i = 0; i < count; ++i) {
    if (stride[i] <= reach) return false;
    reach += (size[i] - 1) * stride[i];
  }
  return true;
}

inline void span(View const& v, int64_t* low, int64_t* high) {
  int64_t below = 0, above = 0;
  for (int i = 0; i < v.rank; ++i) {
    int64_t step = (v.shape[i] - 1) * v.pitch(i);
    (step < 0 ? below : above) += step;
  }
  *low = int64_t(v.address()) + below * v.itemsize();
  *high = int64_t(v.address()) + (above + 1) * v.itemsize();
}

inline bool same_tensor(View const& x, View const& y) {
  if (x.data != y.data || x.rank != y.rank || memcmp(&x.dtype, &y.dtype, sizeof x.dtype)) return false;
  for (int i = 0; i < x.rank; ++i)
    if (x.shape[i] != y.shape[i] || x.strides[i] != y.strides[i]) return false;
  return true;
}

// Two matrices with rows one pitch apart that are disjoint column slices of one buffer.
inline bool interleaved(View const& x, View const& y) {
  if (x.rank != 2 || y.rank != 2 || x.pitch(1) != 1 || y.pitch(1) != 1) return false;
  int64_t pitch = x.pitch(0) * x.itemsize();
  if (pitch <= 0 || pitch != y.pitch(0) * y.itemsize()) return false;
  int64_t offset = int64_t(y.address() - x.address()) % pitch;
  if (offset < 0) offset += pitch;
  return offset >= x.shape[1] * x.itemsize() && offset + y.shape[1] * y.itemsize() <= pitch;
}

inline bool apart_met(View const& x, View const& y, bool may_be_same) {
  int64_t x_low, x_high, y_low, y_high;
  span(x, &x_low, &x_high);
  span(y, &y_low, &y_high);
  if (x_high <= y_low || y_high <= x_low) return true;
  return (may_be_same && same_tensor(x, y)) || interleaved(x, y);
}

inline bool lanes_met(Evaluation& e, View const& x, View const& y) {
  uint64_t got = x.address() < y.address() ? y.address() - x.address() : x.address() - y.address();
  uint64_t limit = uint64_t(1) << 40;
  return e.compare(int64_t(got), int64_t(limit), got % 16 == 0 && 0 < got && got < limit);
}

// An empty tensor has no layout.
inline bool layout_met(Evaluation& e, Requirement const& need, View const& v) {
  View const& other = e.views[need.other];
  int64_t pitch = v.pitch(need.dim), bytes = pitch * v.itemsize();
  switch (need.kind) {
    case Kind::kAligned: {
      int64_t past = int64_t(v.address() % uint64_t(need.value));
      return e.compare(past, 0, past == 0);
    }
    case Kind::kUnit: return e.compare(v.strides[need.dim], 1, v.shape[need.dim] == 1 || v.strides[need.dim] == 1);
    case Kind::kPitchBytes: return e.compare(bytes, need.value, bytes % need.value == 0);
    case Kind::kPitchMin:
      return e.compare(pitch, v.shape[need.other], v.shape[need.dim] == 1 || pitch >= v.shape[need.other]);
    case Kind::kPitchMax: return e.compare(bytes, need.value, bytes < need.value);
    case Kind::kDistinct: return distinct_met(v);
    case Kind::kSamePitch:
      return !other.present || e.compare(pitch, other.pitch(need.dim), pitch == other.pitch(need.dim));
    case Kind::kLanes: return !other.present || lanes_met(e, v, other);
    case Kind::kApart: return !other.present || other.empty() || apart_met(v, other, need.value != 0);
    default: return false;
  }
}

template <class Counts>
bool met(Evaluation& e, Requirement const& need, Counts const& counts) {
  View const& v = e.views[need.arg];
  int64_t size = e.sizes.value(need.extent);
  switch (need.kind) {
    case Kind::kPresent: return v.present;
    case Kind::kProduct: return product_met(e, need);
    case Kind::kAtLeast: return e.compare(size, need.value, size >= need.value);
    case Kind::kAtMost: return e.compare(size, need.value, size <= need.value);
    case Kind::kMultiple: return e.compare(size, need.value, size % need.value == 0);
    default: break;
  }
  if (!v.present) return true;
  int64_t dtype = v.dtype.code << 8 | v.dtype.bits;
  switch (need.kind) {
    case Kind::kDtype: return e.compare(dtype, need.value, dtype == need.value && v.dtype.lanes == 1);
    case Kind::kRank: return rank_met(e, need, v);
    case Kind::kDivisible: return divisible_met(e, need, v);
    case Kind::kSize: return size_met(e, need, v);
    case Kind::kPartials:
      size = counts(need.value == 0);
      return e.compare(v.shape[need.dim], size, v.shape[need.dim] == size);
    case Kind::kCount: return e.compare(v.shape[need.dim], size, 1 <= v.shape[need.dim] && v.shape[need.dim] <= size);
    default: return v.empty() || layout_met(e, need, v);
  }
}

// Copies the sentence into last_error, filling {got}, {want}, {by}, {shape} and {dtype}.
inline void write_sentence(Evaluation const& e, Requirement const& need) {
  View const& v = e.views[need.arg];
  char got[24], want[24], shape[200] = "", dtype[32] = "";
  snprintf(got, sizeof got, "%lld", (long long)e.got);
  snprintf(want, sizeof want, "%lld", (long long)e.want);
  shape_text(v, shape, sizeof shape);
  dtype_name(v.dtype, dtype, sizeof dtype);
  int by = need.extent.variable >= 0 ? e.sizes.fixed_by[need.extent.variable] : -1;
  struct Word { char const* key; char const* text; };
  Word const words[] = {
      {"{got}", got}, {"{want}", want}, {"{shape}", shape}, {"{dtype}", dtype},
      {"{by}", by >= 0 ? e.program.args[by].name : ""},
  };
  char* out = last_error();
  char* end = out + 1023;
  for (char const* in = need.sentence; *in && out < end;) {
    char const* text = nullptr;
    for (Word const& word : words)
      if (!strncmp(in, word.key, strlen(word.key))) text = word.text, in += strlen(word.key);
    if (!text) {
      *out++ = *in++;
      continue;
    }
    while (*text && out < end) *out++ = *text++;
  }
  *out = 0;
}

template <class Counts>
bool check(Program const& program, View const* views, Sizes& sizes, Counts const& counts) {
  for (int i = 0; i < program.variable_count; ++i) sizes.values[i] = sizes.fixed_by[i] = -1;
  Evaluation e{program, views, sizes};
  for (int i = 0; i < program.requirement_count; ++i) {
    if (met(e, program.requirements[i], counts)) continue;
    write_sentence(e, program.requirements[i]);
    return false;
  }
  return true;
}

}  // namespace coda::host
