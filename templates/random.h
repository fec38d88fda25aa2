// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) by the mapping of coda/runtime/philox.py,
// which is part of the language. Host and device give the same bits.
#pragma once
#include "scalar.h"

namespace coda {

struct PhiloxBlock { uint32_t word[4]; };

CODA_FN PhiloxBlock philox4x32(uint64_t key, uint64_t low, uint64_t high) {
  uint32_t c0 = uint32_t(low), c1 = uint32_t(low >> 32), c2 = uint32_t(high), c3 = uint32_t(high >> 32);
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  CODA_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint64_t const a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ k0, c1 = uint32_t(b);
    c2 = uint32_t(a >> 32) ^ c3 ^ k1, c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Element `position & 3` of a block, as a float in [0, 1): 24 bits.
CODA_FN float uniform_of(PhiloxBlock const& b, int64_t position) {
  uint32_t const low = position & 1 ? b.word[1] : b.word[0], high = position & 1 ? b.word[3] : b.word[2];
  return float((position & 2 ? high : low) >> 8) * 5.9604644775390625e-8f;  // 2^-24
}

CODA_FN float uniform(int64_t seed, int64_t offset, int64_t position) {
  return uniform_of(philox4x32(uint64_t(seed), uint64_t(position) >> 2, uint64_t(offset)), position);
}
// Neighbours share a block, but for one pair in four where rows have an odd number of columns.
CODA_FN Two<float> uniform(int64_t seed, int64_t offset, Two<int64_t> position) {
  PhiloxBlock const b = philox4x32(uint64_t(seed), uint64_t(position.x) >> 2, uint64_t(offset));
  float const first = uniform_of(b, position.x);
  if (position.x >> 2 == position.y >> 2) return {first, uniform_of(b, position.y)};
  return {first, uniform(seed, offset, position.y)};
}

}  // namespace coda
